"""One module for each part of the configuration."""
