"""Starts the roles of a run, as commands, on this machine or on a Ray cluster. No torch."""
