"""How many rows of each stream go into a batch: exact, and the same for every caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal


@dataclass(frozen=True)
class BatchPlan:
    """The composition of one iteration's batch, in trajectories."""

    planned_fresh: int
    """What `fraction` asks for; `fresh` differs when the buffer can't give its part."""
    planned_replay: int
    fresh: int
    """To be collected."""
    replay: int
    """To be drawn."""
    fraction: float
    """Configured for this iteration."""

    @property
    def shortfall(self) -> int:
        """Planned rows the buffer can't give."""
        return self.planned_replay - self.replay


def apportion(total: int, shares: Sequence[float | Fraction]) -> list[int]:
    """`total` in whole parts proportional to `shares`, which sum to exactly `total` (Hamilton's largest remainder).

    Each part is within one of its exact quota; of equal remainders the first is rounded up. Shares need not sum to 1.
    """
    exact = [Fraction(share) for share in shares]
    if total < 0 or not exact or min(exact) < 0 or not any(exact):
        raise ValueError(f"shares must be >= 0 with a positive sum and total >= 0, got {list(shares)} of {total}.")
    quotas = [total * share / sum(exact) for share in exact]
    parts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - quotas[i], i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def plan_batch(trajectories: int, fraction: float, *, available: int, mode: Literal["train", "observe"]) -> BatchPlan:
    """Split a batch between the streams.

    train: both streams together are `trajectories`; what the buffer can't give is collected fresh.
    observe: replayed rows come on top of a full fresh batch; what the buffer can't give stays away.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"replay.fraction must be between 0 and 1, got {fraction}.")
    fresh, replay = apportion(trajectories, [1 - Fraction(fraction), Fraction(fraction)])
    drawn = min(replay, available)
    if mode == "observe":
        return BatchPlan(trajectories, replay, trajectories, drawn, fraction)
    return BatchPlan(fresh, replay, trajectories - drawn, drawn, fraction)


def group_sizes(fresh: int, group_size: int) -> list[int]:
    """Sizes of the ceil(fresh / group_size) groups of `fresh` trajectories: as even as possible, larger first."""
    count = -(-fresh // group_size)
    return [fresh // count + (i < fresh % count) for i in range(count)]
