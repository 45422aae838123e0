"""What an iteration asks of the buffer, and what the buffer says it can give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Limits:
    """Which rows a draw may take, whatever they weigh."""

    successful_only: bool = False
    sources: tuple[str, ...] | None = None
    """None: of every source."""


@dataclass(frozen=True)
class Pick:
    """So many rows of one kind."""

    count: int
    source: str | None = None
    """A value of `TrajectoryRecord.source`, or the id of another run; None: any."""
    task: str | None = None
    """Its hash; None: any."""
    unit: Literal["trajectory", "group"] = "trajectory"
    """group: whole stored groups only, of at most `count` rows together."""
    size: int | None = None
    """Members of the groups the rows were born in; None: any."""
    reward_other_than: float | None = None
    """Only rows with another reward; None: any."""


@dataclass(frozen=True)
class DrawRequest:
    """What one iteration asks of the buffer."""

    run: str
    iteration: int
    """Its own rows are never drawn, nor later ones."""
    policy_version: int
    """Of the policy that is about to learn; staleness is counted from it."""
    picks: tuple[Pick, ...] = ()
    """Served in order; a row is drawn once."""
    first_slot: int = 0
    """Of the iteration's batch; drawn rows take this slot and the ones after it."""
    limits: Limits = field(default_factory=Limits)

    @property
    def count(self) -> int:
        """Rows of all picks together."""
        return sum(pick.count for pick in self.picks)


@dataclass(frozen=True)
class Availability:
    """What a draw could take under its limits; rows the sampler gives no weight are none."""

    rows: int = 0
    by_source: Mapping[str, int] = field(default_factory=dict)
    """Under every name a pick can give: the rows' sources, and the ids of other runs."""
    by_task: Mapping[str, int] = field(default_factory=dict)
    by_source_task: Mapping[tuple[str, str], int] = field(default_factory=dict)
    groups: Mapping[int, int] = field(default_factory=dict)
    """Number of complete groups, by size: those of which every member could be drawn."""
    by_source_groups: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """The same by source."""
    by_task_reward: Mapping[tuple[str, float], int] = field(default_factory=dict)
