"""Policies are published: to the sampler in this process, or in folders to engines elsewhere."""
