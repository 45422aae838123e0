"""What an iteration asks of the buffer, and what the buffer says it can give."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from replay.records import FRESH, BatchRow, Count, DrawRecord, Trajectory
from replay.setting_types import Fraction, Positive, Section


class LimitSection(Section):
    """Keys of `replay` that say which rows a draw may take, whatever they weigh."""

    successful_only: bool = Field(True, description="Draw successful trajectories only.")
    max_staleness: int | None = Field(
        None, ge=0, description="Oldest rows drawn, in policy versions; null: however old."
    )
    unknown_staleness: Literal["allow", "refuse"] = Field(
        "allow", description="Rows of other runs, whose staleness nobody knows: drawn, or never."
    )
    max_uses: Positive | None = Field(
        None, description="How often one row is drawn, over all runs of the database; null: any number of times."
    )
    cooldown: int = Field(0, ge=0, description="Iterations a row rests after it was drawn.")
    per_task: Positive | None = Field(None, description="Most rows of one task in one batch; null: any number.")
    per_group: Positive | None = Field(None, description="Most rows of one group in one batch; null: any number.")
    retire_solved: Fraction | None = Field(
        None, description="A task's rows rest while its newest group has at least this success rate; null: never."
    )
    allow_mismatch: tuple[str, ...] = Field(
        (),
        description="Differences to this run that don't keep a row from being drawn, of: tokenizer, template, "
        "model_family, vocab_size, logprobs_mode, top_p, top_k.",
    )


class Limits(LimitSection):
    """Which rows a draw may take."""

    sources: tuple[str, ...] | None = None
    """None: of every source."""
    hindsight_window: int | None = None
    """Most iterations since a row of source `hindsight` was made; None: any number."""
    max_tokens: int | None = None
    """Of a training sequence, `context.max_tokens`; None: any number."""


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
    """Members of the groups the rows were collected with; None: any."""
    reward_other_than: float | None = None
    """Only rows with another reward; None: any."""


@dataclass(frozen=True)
class DrawRequest:
    run: str
    iteration: Count
    """Its own rows are never drawn, nor later ones."""
    policy_version: Count
    """The version of the policy that is about to learn; staleness is counted from it."""
    picks: tuple[Pick, ...] = ()
    """Served in order; a row is drawn once."""
    first_slot: Count = 0
    """Drawn rows take this slot of the iteration's batch and the ones after it."""
    limits: Limits = field(default_factory=Limits)

    @property
    def named(self) -> frozenset[str]:
        """Sources and other runs that rows are asked of by name."""
        return frozenset(self.limits.sources or ()) | {pick.source for pick in self.picks if pick.source is not None}

    @property
    def count(self) -> int:
        return sum(pick.count for pick in self.picks)

    @property
    def slots(self) -> range:
        return range(self.first_slot, self.first_slot + self.count)

    def fresh_rows(self, trajectories: Sequence[Trajectory]) -> list[BatchRow]:
        """The iteration's own rows, which take its first slots."""
        return [BatchRow.drawn(row, self.draw_of(row, slot, FRESH)) for slot, row in enumerate(trajectories)]

    def draw_of(
        self, trajectory: Trajectory, slot: int, stream: str, *, probability: float | None = None, weight: float = 1.0
    ) -> DrawRecord:
        """The record of a row in a slot of the iteration's batch."""
        record = trajectory.record
        staleness = self.policy_version - record.policy_version_min if record.run == self.run else None
        return DrawRecord(self.run, self.iteration, slot, record.id, stream, probability, staleness, weight=weight)


@dataclass(frozen=True)
class Availability:
    """What a draw could take under its limits; rows the sampler gives no weight are none.

    Numbers of rows keep to the caps per task and group, each as if nothing else were drawn; groups and rewards don't.
    """

    rows: int = 0
    by_source: Mapping[str, int] = field(default_factory=dict)
    """Under every name a pick can give: the rows' sources, and the ids of other runs."""
    by_task: Mapping[str, int] = field(default_factory=dict)
    by_source_task: Mapping[tuple[str, str], int] = field(default_factory=dict)
    groups: Mapping[int, int] = field(default_factory=dict)
    """Number of complete groups, by size: those of which every member could be drawn."""
    by_source_groups: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Number of complete groups, by source and size."""
    by_task_reward: Mapping[tuple[str, float], int] = field(default_factory=dict)
    unknown_priority: int = 0
    """Rows that could be drawn if their priority were known."""
    incomparable: Mapping[str, int] = field(default_factory=dict)
    """Rows left out because they differ from the drawing run, by what differs."""
