"""What a trajectory is compared with: one module for each value of `algorithm`."""
