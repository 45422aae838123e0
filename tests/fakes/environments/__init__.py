"""Environments and reward functions as users write them: each file is one that a configuration names."""

from pathlib import Path

ENVIRONMENTS = Path(__file__).parent
