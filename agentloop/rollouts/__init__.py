"""Acting: episodes in environments, their rewards and trajectories, evaluations, and the use of stored episodes."""
