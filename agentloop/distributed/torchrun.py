"""What torchrun says of this process; nothing heavy is imported for it."""

import os

from agentloop.errors import UserError


def ranks_wanted() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_rank() -> int:
    """The rank of this process; 0 without torchrun, whatever else a cluster calls a rank."""
    return int(os.environ.get("RANK", "0")) if ranks_wanted() > 1 else 0


def check_alone(command: str) -> None:
    """Several processes would do the same at once, over each other's files. Raises UserError."""
    if ranks_wanted() > 1:
        raise UserError(
            f"torchrun must start train, which alone runs on several ranks, got {command} on {ranks_wanted()}. "
            "Run it without torchrun."
        )
