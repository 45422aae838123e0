"""What is configured about what a batch is made of, and the rule a run has of it."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from replay.setting_types import Fraction, NonNegative, Positive, Section

Step = tuple[NonNegative, Fraction]
Unit = Literal["any", "trajectory", "task", "group"]

SAME_TASK: frozenset[Unit] = frozenset({"trajectory", "task"})
"""Units whose replayed members have the task of the fresh ones of the batch."""


class Schedule(Section):
    """From `replay.fraction` to `final` while the run goes from `begin` to `end`; before and after, the nearer one."""

    shape: Literal["constant", "linear", "cosine", "step"] = Field(
        "constant", description="Course of replay.fraction: constant, to `final`, or in `steps`."
    )
    final: Fraction | None = Field(None, description="Share at `end` (linear, cosine).")
    over: Literal["progress", "iterations"] = Field(
        "progress", description="What places are counted in: 0 to 1 of the run, or iterations from 1."
    )
    begin: NonNegative | None = Field(
        None, description="Where the course leaves replay.fraction (linear, cosine); null: at the first iteration."
    )
    end: NonNegative | None = Field(
        None, description="Where it reaches `final` (linear, cosine); null: at the last iteration."
    )
    steps: tuple[Step, ...] = Field(
        (), description="[place, share] pairs, each share holding from its place on (step), e.g. [[0.5, 0.1]]."
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
        beyond = [place for place in (self.begin, self.end, *places) if place is not None and place > 1]
        if self.over == "progress" and beyond:
            raise ValueError(
                f"replay.schedule.over must be iterations for a place beyond 1, got {beyond[0]:g} of progress. "
                "Set replay.schedule.over: iterations."
            )
        return self

    def at(self, first: float, iteration: int, iterations: int) -> float:
        """The share of 1-based `iteration` of a run of `iterations`, where `replay.fraction` is `first`."""
        place = progress_at(iteration, iterations) if self.over == "progress" else float(iteration)
        if self.shape == "step":
            return next((share for start, share in reversed(self.steps) if place >= start), first)
        if self.final is None:
            return first
        earliest, latest = (0.0, 1.0) if self.over == "progress" else (1.0, float(iterations))
        begin = earliest if self.begin is None else self.begin
        length = (latest if self.end is None else self.end) - begin
        done = min(1.0, max(0.0, (place - begin) / length)) if length > 0 else float(place > begin)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        # Not first + (final - first) * done: at either end the value must be exactly the one asked for.
        return first * (1 - done) + self.final * done

    def highest(self, first: float) -> float:
        """The largest share it ever takes, where `replay.fraction` is `first`."""
        return max(first, *(share for _, share in self.steps), first if self.final is None else self.final)


def progress_at(iteration: int, iterations: int) -> float:
    """Where 1-based `iteration` is in a run of `iterations`: 0 at the first, 1 at the last."""
    return min(1.0, (iteration - 1) / max(1, iterations - 1))


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
        description="What the buffer can't give: fresh, is collected; shrink, is left out, and the learning rate falls "
        "as the rows per step do; error, the run stops.",
    )


class MixRule(MixSection):
    """The composition of every iteration's batch. For every unit but `any`, whole groups make up the batch."""

    trajectories: Positive
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
