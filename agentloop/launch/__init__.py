"""Starts the roles of a run, as commands, on this machine, on a Ray cluster or under Slurm. No torch."""
