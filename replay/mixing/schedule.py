"""How the fraction runs over a training run: a pure function of where the run is."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from replay.setting_types import Fraction, NonNegative, Section

Step = tuple[NonNegative, Fraction]


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
