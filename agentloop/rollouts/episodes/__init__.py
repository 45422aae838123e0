"""Episodes: one, many at once, and whose turn it is."""
