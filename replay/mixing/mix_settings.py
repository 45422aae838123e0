"""The keys of `replay` that decide how batches are composed, and the rule that a run makes of them."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from replay.setting_types import Fraction, Positive, Section

Step = tuple[Fraction, Fraction]
Unit = Literal["any", "trajectory", "task", "group"]

SAME_TASK: frozenset[Unit] = frozenset({"trajectory", "task"})
"""Units whose replayed rows must have the tasks of the batch's fresh groups."""


class Schedule(Section):
    """The share goes from `replay.fraction` at `begin` to `final` at `end`, and is constant before and after."""

    shape: Literal["constant", "linear", "cosine", "step"] = Field(
        "constant", description="Course of replay.fraction: constant, to `final`, or in `steps`."
    )
    final: Fraction | None = Field(None, description="Share at `end` (linear, cosine).")
    begin: Fraction | None = Field(
        None, description="Progress of the run at which the course leaves replay.fraction (linear, cosine); null: 0."
    )
    end: Fraction | None = Field(
        None, description="Progress of the run at which it reaches `final` (linear, cosine); null: 1."
    )
    steps: tuple[Step, ...] = Field(
        (), description="[progress, share] pairs, each share holding from there on (step), e.g. [[0.5, 0.1]]."
    )

    @model_validator(mode="after")
    def _fits_its_shape(self) -> Self:
        shape, sloping = self.shape, self.shape in ("linear", "cosine")
        if sloping and self.final is None:
            raise ValueError(f"replay.schedule.final must be a share when shape is {shape}, got null. Set it.")
        if shape == "step" and not self.steps:
            raise ValueError(
                "replay.schedule.steps must hold a pair when shape is step, got []. Set [[0.5, 0.1]], say."
            )
        used = ("final", "begin", "end") if sloping else ("steps",) if shape == "step" else ()
        for name in ("final", "begin", "end", "steps"):
            if name not in used and (value := getattr(self, name)) not in (None, ()):
                raise ValueError(
                    f"replay.schedule.{name} must be left out when replay.schedule.shape is {shape}, got {value}. "
                    "Remove it, or set the shape that uses it."
                )
        if self.begin is not None and self.end is not None and self.begin >= self.end:
            raise ValueError(f"replay.schedule.end must be above begin ({self.begin:g}), got {self.end:g}. Raise it.")
        places = [place for place, _ in self.steps]
        if sorted(set(places)) != places:
            raise ValueError(f"replay.schedule.steps must have ascending places, got {places}. Sort them.")
        return self

    def share_at(self, first: float, iteration: int, iterations: int) -> float:
        """Return the share of 1-based `iteration` in a run of `iterations`. `first` is `replay.fraction`."""
        place = min(1.0, (iteration - 1) / max(1, iterations - 1))  # 0 in the first iteration, 1 in the last
        if self.shape == "step":
            return next((share for start, share in reversed(self.steps) if place >= start), first)
        if self.final is None:
            return first
        begin = 0.0 if self.begin is None else self.begin
        length = (1.0 if self.end is None else self.end) - begin
        done = min(1.0, max(0.0, (place - begin) / length)) if length > 0 else float(place > begin)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        # This form gives exactly `first` and `final` at the ends; first + (final - first) * done does not.
        return first * (1 - done) + self.final * done

    def highest_share(self, first: float) -> float:
        """Return the largest share of the whole schedule. `first` is `replay.fraction`."""
        return max(first, *(share for _, share in self.steps), first if self.final is None else self.final)


class StartRule(Section):
    iteration: Positive = Field(1, description="First iteration with replay.")
    success_rate: Fraction | None = Field(
        None, description="No replay before an iteration's fresh episodes succeed this often; once is enough."
    )
    buffer: int = Field(0, ge=0, description="No replay before this many rows can be drawn.")


class MixSection(Section):
    """Keys of `replay` that say how much of a batch is replayed, and in what pieces."""

    fraction: Fraction = Field(0.0, description="Share of the batch's trajectories drawn from the buffer.")
    schedule: Schedule = Field(default_factory=Schedule, description="How the fraction runs over the run.")
    start: StartRule = Field(
        default_factory=StartRule, description="Replay begins once all of this holds, and never stops again."
    )
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
        description="Shares of the replayed rows by source, summing to 1, e.g. {self: 0.7, teacher: 0.3}; {}: no "
        "shares, the sampler draws from all sources.",
    )
    shortfall: Literal["fresh", "shrink"] = Field(
        "fresh",
        description="If the buffer has too few rows: fresh collects the missing ones, shrink leaves them out and "
        "lowers the learning rate as the rows per step.",
    )


class MixRule(MixSection):
    """The rule for the composition of every batch. For every unit but `any`, a batch consists of whole groups."""

    trajectories: Positive
    group_size: Positive
    iterations: Positive
    """The length that the run was begun with, over which the schedule runs."""

    @property
    def num_groups(self) -> int:
        return self.trajectories // self.group_size

    @property
    def highest_fraction(self) -> float:
        return self.schedule.highest_share(self.fraction)

    def fraction_at(self, iteration: int) -> float:
        """Return the configured share of 1-based `iteration`."""
        return self.schedule.share_at(self.fraction, iteration, self.iterations)
