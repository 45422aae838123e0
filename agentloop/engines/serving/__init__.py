"""Engines on this machine: starting them, watching them, and publishing the policy to them with a proof."""
