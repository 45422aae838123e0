"""Two of something, side by side."""
