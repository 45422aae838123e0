"""What acting and learning share: rows of a batch, penalties, the reasons an episode ends for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from context.strategies import CONTEXT_FULL, SUMMARY_TOO_LONG
from replay.records import Trajectory

TRUNCATED = "truncated"
MAX_TURNS = "max_turns"
ENGINE_FAILURE = "engine_failure"
CALLED_LAST = "tool_calls"
"""Of an imported conversation whose last reply calls a tool."""
CUT_OFF = frozenset({TRUNCATED, MAX_TURNS, CONTEXT_FULL, SUMMARY_TOO_LONG, CALLED_LAST})
"""Limits on tokens and turns, and records that stop short: from the state they leave, an episode could have gone on.
Whatever is not named here is an end of the task itself, imported reasons too."""


@dataclass(frozen=True)
class BatchRow:
    """A trajectory in its role within one iteration."""

    trajectory: Trajectory
    stream: Literal["fresh", "replay"]
    advantage: float
    """Of the whole trajectory; reward units."""
    staleness: int | None = None
    """Of a replayed row, in publishes; None: unknown."""
    weight: float = 1.0
    """Of the row's loss: what its sampler corrects for."""
    token_advantages: tuple[npt.NDArray[np.float32], ...] | None = None
    """One array per segment, one number per token; None: `advantage` on every trained token."""
    scored: bool = False
    """Sampled by the weights as they are, in sight of just these tokens: its behavior log-probs are its old ones."""


@dataclass(frozen=True)
class Charge:
    """Of one trajectory."""

    penalty: float = 0.0
    """What is taken off its reward; reward units."""
    kl: float = 0.0
    """What it is charged for: nats, summed over `tokens`."""
    tokens: int = 0
    """Action tokens whose behavior log-prob is known."""


Penalty = Callable[[Sequence[Trajectory]], list[Charge]]


def kl_metrics(charges: Iterable[Charge]) -> dict[str, float]:
    """What fresh rewards were charged for, in nats per action token; nothing where no token was."""
    found = list(charges)
    tokens = sum(charge.tokens for charge in found)
    return {"actor/reward_kl": sum(charge.kl for charge in found) / tokens} if tokens else {}
