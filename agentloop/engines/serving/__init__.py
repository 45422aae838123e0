"""Engines of this machine: how they are started, watched, and given the policy with a proof."""
