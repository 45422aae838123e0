"""Reads torchrun's environment variables, without importing torch."""

import os

from agentloop.errors import UserError


def ranks_wanted() -> int:
    """Return how many processes torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_rank() -> int:
    """Return this process's rank; 0 without torchrun, even if a cluster has set RANK."""
    return int(os.environ.get("RANK", "0")) if ranks_wanted() > 1 else 0


def check_alone(command: str) -> None:
    """Check that torchrun has started one process: several would write the same files. Raises UserError."""
    if ranks_wanted() > 1:
        raise UserError(
            f"torchrun must start train, which alone runs on several ranks, got {command} on {ranks_wanted()}. "
            "Run it without torchrun."
        )
