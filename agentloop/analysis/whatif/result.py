"""What `replay whatif` finds out: numbers alone, for the terminal and for programs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

ALL = "all"
"""The part that holds every row."""


@dataclass(frozen=True)
class AskedObjective:
    """An objective that was asked about."""

    name: str
    fresh: str
    """Its loss of fresh rows in short."""
    replay: str


@dataclass(frozen=True)
class PartData:
    """The rows of one staleness bucket, or all of them. The same for every objective."""

    bucket: str
    trajectories: int
    tokens: int
    """Action tokens."""
    unknown: int
    """Of them, those without a behavior log-prob: they are in neither drift nor ESS."""
    drift_mean: float | None
    drift_max: float | None
    ess: float | None


@dataclass(frozen=True)
class Effect:
    """One optimizer step of one objective on one part alone, which is not made."""

    objective: str
    bucket: str
    trained_tokens: int
    """After a correction by rejection."""
    clipped: float | None
    """Share of the trained tokens whose loss a bound of the objective decided."""
    clipped_above: float | None
    """Of the trained tokens: clipped with a ratio above 1."""
    clipped_below: float | None
    clipped_dual: float | None
    """Share whose loss the dual clip decided; not among `clipped`."""
    ratio_p01: float | None
    """Over the trained tokens of rows with a gradient pass, as the metrics of a run."""
    ratio_p50: float | None
    ratio_p99: float | None
    approx_kl: float | None
    loss: float
    gradient_norm: float
    """Before `optimizer.max_grad_norm`."""


@dataclass(frozen=True)
class LeftOut:
    """Rows that are in no number."""

    why: str
    count: int
    ids: tuple[str, ...]
    """The first of them."""


@dataclass(frozen=True)
class WhatIf:
    run: str
    """Its name."""
    version: int
    """Of the policy that was asked."""
    weights: str
    rows: str
    """What the rows are, in words."""
    advantages: str
    """Where their advantages come from, in words."""
    found: int
    """Rows to choose from."""
    objectives: tuple[AskedObjective, ...]
    data: tuple[PartData, ...]
    """By bucket, the youngest first; `all` is the last."""
    effects: tuple[Effect, ...]
    """By bucket, then by objective."""
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]

    def effect(self, objective: str, bucket: str = ALL) -> Effect:
        (found,) = [e for e in self.effects if (e.objective, e.bucket) == (objective, bucket)]
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is no finite number is None."""
        answer: dict[str, Any] = _finite(asdict(self))
        return answer


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
