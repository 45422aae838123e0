"""Acting: episodes in environments, their rewards, the trajectories they become, and what is made of stored ones."""
