"""Acting: episodes in environments, what they are rewarded with, and the trajectories they become."""
