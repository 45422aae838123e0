"""Plays one episode or many at once, with the policy alone or with an agent program."""
