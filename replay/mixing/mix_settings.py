"""What is configured about what a batch is made of, and the rule a run has of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from replay.mixing.schedule import Schedule
from replay.setting_types import Fraction, Positive, Section

Unit = Literal["any", "trajectory", "task", "group"]

SAME_TASK: frozenset[Unit] = frozenset({"trajectory", "task"})
"""Units whose replayed members have the task of the fresh ones beside them."""


class StartRule(Section):
    iteration: Positive = Field(1, description="First iteration with replay.")
    progress: Fraction = Field(0.0, description="No replay before this share of the run.")
    success_rate: Fraction | None = Field(
        None, description="No replay before an iteration's fresh episodes succeed this often; once is enough."
    )
    buffer: int = Field(0, ge=0, description="No replay before this many rows can be drawn.")


class EssRule(Section):
    """Multiplicative: lowered fast, raised slowly, so that the fraction settles under the one that hurts."""

    weights: Literal["mean", "sequence", "token"] = Field(
        "token",
        description="Whose ratios the ESS is over: each token's own, or of each trajectory their product (sequence) or "
        "their geometric mean (mean), which hardly ever leaves 1.",
    )
    floor: Fraction = Field(0.5, description="ESS under which an age bucket of the replay stream is too far off.")
    lower_by: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.5, description="The fraction is multiplied by this after an iteration with a bucket under the floor."
    )
    raise_by: Annotated[float, Field(gt=1.0)] = Field(
        1.1, description="And by this after any other one, up to what is configured."
    )
    least: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.1, description="The fraction is never lowered below this share of what is configured."
    )

    def next_factor(self, factor: float, ess_by_age: Mapping[str, float]) -> float:
        """The factor of the next iteration's fraction, in [least, 1].

        One bucket under the floor lowers it: the oldest rows go bad first, and a mean over all would hide them. A
        bucket of one row has ESS 1, and an iteration without replay has no bucket: both let it rise.
        """
        if any(ess < self.floor for ess in ess_by_age.values()):
            return max(self.least, factor * self.lower_by)
        return min(1.0, factor * self.raise_by)


class MixSection(Section):
    """Keys of `replay` that say how much of a batch is replayed, and in what pieces."""

    fraction: Fraction = Field(0.0, description="Share of the batch's trajectories drawn from the buffer.")
    schedule: Schedule = Field(default_factory=Schedule, description="How the fraction runs over the run.")
    start: StartRule = Field(
        default_factory=StartRule, description="No replay before all of this holds; from then on it is not asked."
    )
    controller: Literal["none", "ess"] = Field(
        "none", description="ess: less replay while an age bucket of it has too low an effective sample size."
    )
    ess: EssRule = Field(default_factory=EssRule, description="How the controller `ess` acts.")
    mode: Literal["train", "observe"] = Field(
        "train", description="train: replayed tokens carry loss; observe: they come on top and are only measured."
    )
    unit: Unit = Field(
        "any",
        description="any: single trajectories; trajectory: members of every group, of its task; task: of some groups; "
        "group: whole stored groups; see docs/mixing.md.",
    )
    task_members: Positive | None = Field(None, description="Replayed members of a mixed group (unit task).")
    sources: dict[str, Fraction] = Field(
        default_factory=dict,
        description="Shares of the replayed rows by source, or by the id of another run, summing to 1, e.g. {self: "
        "0.7, teacher: 0.3}; {}: as the sampler takes the run's own and imported ones.",
    )
    shortfall: Literal["fresh", "shrink", "error"] = Field(
        "fresh",
        description="What the buffer can't give: fresh, is collected; shrink, is left out; error, the run stops.",
    )


class MixRule(MixSection):
    """The composition of every iteration's batch. For every unit but `any`, whole groups make up the batch."""

    trajectories: Positive
    """The rows of one batch, fresh and replayed together."""
    group_size: Positive
    iterations: Positive
    """What the schedule is laid over: the length that the run was begun with."""

    @property
    def num_groups(self) -> int:
        return self.trajectories // self.group_size

    @property
    def highest_fraction(self) -> float:
        return self.schedule.highest(self.fraction)

    def fraction_at(self, iteration: int) -> float:
        """The configured share of 1-based `iteration`."""
        return self.schedule.at(self.fraction, iteration, self.iterations)
