"""What `replay whatif` finds out: numbers for programs, and the same in tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from replay.text_tables import Cell, row_table

ALL = "all"
"""The part that holds every row."""
_MOST_NAMED = 10


@dataclass(frozen=True)
class AskedObjective:
    """An objective that was asked about."""

    name: str
    fresh: str
    """Its loss of fresh rows in short."""
    replay: str


@dataclass(frozen=True)
class PartData:
    """The rows of one staleness bucket, or all of them; alike for every objective."""

    bucket: str
    trajectories: int
    tokens: int
    """Action tokens."""
    unknown: int
    """Those of them without a behavior log-prob: they are in neither drift nor ESS."""
    drift_mean: float | None
    token_gap_max: float | None
    """Nats."""
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
    """Share of the trained tokens that are clipped with a ratio above 1."""
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
class WhatIf:
    run: str
    """Its name."""
    version: int
    """The policy that was asked."""
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
    left_out: dict[str, tuple[str, ...]]
    """Ids of rows that are in no number, by the reason why."""
    notes: tuple[str, ...]

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


def _percent(name: str) -> Cell:
    return lambda row: "-" if row[name] is None else f"{row[name]:.2%}"


_DATA: dict[str, Cell] = {
    "bucket": "bucket",
    "rows": "trajectories",
    "tokens": "tokens",
    "unknown": "unknown",
    "drift": ("drift_mean", 3),
    "gap": ("token_gap_max", 2),
    "ESS": ("ess", 3),
}
_EFFECTS: dict[str, Cell] = {
    "bucket": "bucket",
    "objective": "objective",
    "trained": "trained_tokens",
    "clipped": _percent("clipped"),
    **{part: _percent(f"clipped_{part}") for part in ("above", "below", "dual")},
    **{part: (f"ratio_{part}", 3) for part in ("p01", "p50", "p99")},
    "loss": ("loss", 5),
    "gradient": lambda row: f"{row['gradient_norm']:.4g}",
}


def as_text(found: WhatIf) -> str:
    return "\n".join(
        [
            *_heading(found),
            "\nthe rows, the same for every objective:",
            row_table([*map(vars, found.data)], _DATA),
            "\none optimizer step of each objective, alone on the rows of a bucket and on all:",
            row_table([*map(vars, found.effects)], _EFFECTS),
            *(f"note: {note}" for note in found.notes),
        ]
    )


def _heading(found: WhatIf) -> Iterator[str]:
    """Whose rows, which policy, which objectives, and what is in no number."""
    looked_at = found.data[-1].trajectories
    thinned = "" if looked_at == found.found else f" of {found.found:,}, evenly over their age"
    yield f"policy      {found.version} of {found.run} ({found.weights})"
    yield f"rows        {looked_at:,}{thinned}: {found.rows}; advantages are {found.advantages}"
    for why, ids in found.left_out.items():
        more = ", ..." if len(ids) > _MOST_NAMED else ""
        yield f"left out    {len(ids):,}, {why}: {', '.join(id[:12] for id in ids[:_MOST_NAMED])}{more}"
    width = max(len(objective.name) for objective in found.objectives)
    for objective in found.objectives:
        yield f"objective   {objective.name:<{width}}  fresh {objective.fresh}; replay {objective.replay}"
