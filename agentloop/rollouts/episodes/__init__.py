"""Plays episodes: one, or many at once, with the policy or with an agent of its own."""
