"""Where the fresh rows of an iteration come from: episodes that the loop runs itself, or that workers run for it."""
