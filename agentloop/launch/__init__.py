"""Starts a run's roles as commands, on this machine. It imports no torch."""
