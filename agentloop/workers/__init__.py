"""Processes that collect episodes for runs: they claim tickets, run them on its engines, store the rows."""
