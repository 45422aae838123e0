"""The records with which an iteration asks the buffer for rows, and with which the buffer answers what it has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from replay.records import FRESH, BatchRow, Count, DrawRecord, Trajectory
from replay.setting_types import Positive, Section


class LimitSection(Section):
    """Keys of `replay` that say which rows a draw may take, whatever they weigh."""

    successful_only: bool = Field(True, description="Draw successful trajectories only.")
    max_staleness: int | None = Field(
        None, ge=0, description="Largest staleness of drawn rows of the run, in policy versions; null: any."
    )
    max_uses: Positive | None = Field(
        None, description="Most draws of one row, over all runs of the database; null: any number."
    )
    per_task: Positive | None = Field(None, description="Most rows of one task in one batch; null: any number.")
    per_group: Positive | None = Field(None, description="Most rows of one group in one batch; null: any number.")
    allow_mismatch: tuple[str, ...] = Field(
        (),
        description="Differences to this run that rows may have and still be drawn, of: tokenizer, template, "
        "model_family, vocab_size, logprobs_mode, top_p, top_k.",
    )


class Limits(LimitSection):
    """The limits on the rows that a draw may take."""

    sources: tuple[str, ...] | None = None
    """Sources that rows may have. None: any source."""
    hindsight_window: int | None = None
    """Most iterations since a row of source `hindsight` was made. None: any number."""
    max_tokens: int | None = None
    """Most tokens of a training sequence (`context.max_tokens`). None: any number."""


@dataclass(frozen=True)
class Pick:
    """A pick asks for `count` rows of one kind."""

    count: int
    source: str | None = None
    """A value of `TrajectoryRecord.source`. None: any source."""
    task: str | None = None
    """The hash of the task. None: any task."""
    unit: Literal["trajectory", "group"] = "trajectory"
    """group: only whole stored groups, of at most `count` rows together."""
    size: int | None = None
    """The size of the groups that the rows were collected with. None: any size."""


@dataclass(frozen=True)
class DrawRequest:
    """A run's request for the replayed rows of one iteration."""

    run: str
    iteration: Count
    """The drawing iteration. The run's rows of this and later iterations are never drawn."""
    policy_version: Count
    """The version of the policy that is about to learn, from which staleness is counted."""
    picks: tuple[Pick, ...] = ()
    """The picks, served in order. A row is drawn once."""
    first_slot: Count = 0
    """The first of the consecutive slots of the batch that the drawn rows take."""
    limits: Limits = field(default_factory=Limits)

    @property
    def named_sources(self) -> frozenset[str]:
        """The sources that the limits or picks name."""
        return frozenset(self.limits.sources or ()) | {pick.source for pick in self.picks if pick.source is not None}

    @property
    def count(self) -> int:
        return sum(pick.count for pick in self.picks)

    @property
    def slots(self) -> range:
        return range(self.first_slot, self.first_slot + self.count)

    def fresh_rows(self, trajectories: Sequence[Trajectory]) -> list[BatchRow]:
        """Return the iteration's own rows as rows of its batch. They take the first slots."""
        return [BatchRow.drawn(row, self.record_draw(row, slot, FRESH)) for slot, row in enumerate(trajectories)]

    def record_draw(
        self, trajectory: Trajectory, slot: int, stream: str, *, probability: float | None = None, weight: float = 1.0
    ) -> DrawRecord:
        """Make the record of a row in a slot of the iteration's batch."""
        record = trajectory.record
        staleness = self.policy_version - record.policy_version_min if record.run == self.run else None
        return DrawRecord(self.run, self.iteration, slot, record.id, stream, probability, staleness, weight=weight)


@dataclass(frozen=True)
class Availability:
    """The numbers of rows and groups that a draw could take. Rows without a weight are not counted.

    Numbers of rows respect the caps per task and per group, each as if nothing else were drawn. Numbers of groups do
    not.
    """

    rows: int = 0
    by_source: Mapping[str, int] = field(default_factory=dict)
    """Number of rows by source."""
    by_task: Mapping[str, int] = field(default_factory=dict)
    by_source_task: Mapping[tuple[str, str], int] = field(default_factory=dict)
    groups: Mapping[int, int] = field(default_factory=dict)
    """Number of complete groups, by size. Every member of a complete group could be drawn."""
    by_source_groups: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Number of complete groups, by source and size."""
    unknown_priority: int = 0
    """Number of rows that could be drawn if their priority were known."""
    incomparable: Mapping[str, int] = field(default_factory=dict)
    """Number of rows that are excluded because they differ from the drawing run, by the name of the difference."""
