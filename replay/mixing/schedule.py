"""How a number runs over a training run: a pure function of where the run is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Shape = Literal["constant", "linear", "cosine", "step"]
Over = Literal["progress", "iterations"]


@dataclass(frozen=True)
class Schedule:
    """From `first` to `final` while the run goes from `begin` to `end`; before and after, the nearer of the two."""

    first: float
    shape: Shape = "constant"
    final: float = 0.0
    """Reached at `end` (linear, cosine)."""
    over: Over = "progress"
    """What `begin`, `end` and the places of `steps` are counted in: 0..1 of the run, or iterations from 1."""
    begin: float = 0.0
    end: float = 1.0
    steps: tuple[tuple[float, float], ...] = ()
    """(place, value), places ascending: `value` holds from there on; `first` before the first (step)."""

    def at(self, iteration: int, progress: float) -> float:
        """The value of 1-based `iteration`, which is `progress` (0..1) of the run."""
        place = progress if self.over == "progress" else float(iteration)
        if self.shape == "constant":
            return self.first
        if self.shape == "step":
            return next((value for start, value in reversed(self.steps) if place >= start), self.first)
        length = self.end - self.begin
        done = min(1.0, max(0.0, (place - self.begin) / length)) if length > 0 else float(place > self.begin)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        # Not first + (final - first) * done: at either end the value must be exactly the one asked for.
        return self.first * (1 - done) + self.final * done

    @property
    def highest(self) -> float:
        """The largest value it ever takes."""
        if self.shape == "step":
            return max(self.first, *(value for _, value in self.steps))
        return self.first if self.shape == "constant" else max(self.first, self.final)


def progress_at(iteration: int, iterations: int) -> float:
    """Where 1-based `iteration` is in a run of `iterations`: 0 at the first, 1 at the last."""
    return min(1.0, (iteration - 1) / max(1, iterations - 1))
