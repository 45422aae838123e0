"""The fresh rows of an iteration, from episodes that the loop runs itself or that workers run for it."""
