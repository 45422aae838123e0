"""A run's updates made again from what it stored, and the weights they give beside the run's own."""
