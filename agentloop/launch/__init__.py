"""Starts a run's roles as commands, on this machine or on a Ray cluster. It imports no torch."""
