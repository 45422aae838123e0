"""Several environments in one run."""
