"""What is declared about a batch, and what becomes of it in one iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from replay.mixing.request import Pick
from replay.mixing.schedule import Schedule

Unit = Literal["any", "trajectory", "task", "group"]
Shortfall = Literal["fresh", "shrink", "error"]
Mode = Literal["train", "observe"]


SAME_TASK: frozenset[Unit] = frozenset({"trajectory", "task"})
"""Units whose replayed members have the task of the fresh ones beside them."""


@dataclass(frozen=True)
class StartRule:
    """No replay before all of these hold; from then on they are not asked again."""

    iteration: int = 1
    progress: float = 0.0
    success_rate: float | None = None
    """Of one iteration's fresh episodes; holds once reached, even if success falls again."""
    buffer: int = 0
    """Rows that may be drawn."""


@dataclass(frozen=True)
class MixRule:
    """The composition of every iteration's batch. For every unit but `any`, whole groups make up the batch."""

    trajectories: int
    """Of one batch, fresh and replayed together."""
    group_size: int
    fraction: Schedule
    """Share of the batch's trajectories that comes from the buffer."""
    unit: Unit = "any"
    task_members: int = 0
    """Replayed members of a mixed group; unit `task` only."""
    sources: Mapping[str, float] = field(default_factory=dict)
    """Shares of the replayed rows; empty: whatever the sampler takes."""
    start: StartRule = StartRule()
    controller: EssRule | None = None
    shortfall: Shortfall = "fresh"
    mode: Mode = "train"

    @property
    def num_groups(self) -> int:
        return self.trajectories // self.group_size


@dataclass(frozen=True)
class BatchPlan:
    """One iteration's batch in trajectories: what was configured, what the rule makes of it, what there will be."""

    planned_fresh: int
    """Ruled: after start, controller and rounding."""
    planned_replay: int
    planned_sources: Mapping[str, int]
    """Ruled rows of each declared source."""
    groups: tuple[tuple[int, int], ...]
    """(slot, size) of every group to collect; slots count the iteration's tasks from 0."""
    num_tasks: int
    """Slots: tasks the iteration goes through. A slot that is replayed whole has no group to collect."""
    picks: tuple[Pick, ...]
    starved_groups: int
    """Groups for which the buffer had fewer members than ruled."""
    fraction: float = 0.0
    """Configured for this iteration: `replay.fraction` along its schedule."""

    @property
    def fresh(self) -> int:
        """To be collected."""
        return sum(size for _, size in self.groups)

    @property
    def replay(self) -> int:
        """To be drawn."""
        return sum(pick.count for pick in self.picks)

    @property
    def shortfall(self) -> int:
        """Ruled rows the buffer can't give."""
        return self.planned_replay - self.replay


@dataclass(frozen=True)
class EssRule:
    """Multiplicative: lowered fast, raised slowly, so that it settles under the fraction that hurts."""

    floor: float
    """ESS under which a bucket is too far off-policy."""
    lower_by: float
    """Factor of one step down, in (0, 1)."""
    raise_by: float
    """Factor of one step up, above 1."""
    least: float
    """The factor never falls below this, in (0, 1]: without any replay there would be no ESS to raise it by."""

    def next_factor(self, factor: float, ess_by_age: Mapping[str, float]) -> float:
        """The factor of the next iteration's fraction, in [least, 1].

        One bucket under the floor lowers it: the oldest rows go bad first, and a mean over all would hide them. A
        bucket of one row has ESS 1, and an iteration without replay has no bucket: both let it rise.
        """
        if any(ess < self.floor for ess in ess_by_age.values()):
            return max(self.least, factor * self.lower_by)
        return min(1.0, factor * self.raise_by)
