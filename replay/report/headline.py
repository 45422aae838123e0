"""What a stored configuration says: of one that another version wrote, a key may be missing or mean something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from replay.mixing.schedule import Schedule
from replay.report.svg import number

T = TypeVar("T")
Config = Mapping[str, Any]
"""A run's configuration as it is stored."""


def stored(config: Config, dotted: str, kind: type[T]) -> T | None:
    """The value of `replay.fraction`, say; None where there is none, or none of that kind. Whole numbers are floats."""
    value: Any = config
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    return value if fits else None


def setting(config: Config) -> str:
    """What makes this run this run, in one line."""
    seed, target = stored(config, "run.seed", int), stored(config, "run.stop_at_success", float)
    parts = [
        stored(config, "environment.name", str),
        None if seed is None else f"seed {seed}",
        _replay(config),
        None if target is None else f"ends at {number(target, percent=True)} held-out success twice in a row",
    ]
    return " \u00b7 ".join(part for part in parts if part).replace(" %", "\u00a0%")


def _replay(config: Config) -> str | None:
    shares = _shares(config)
    if shares is None:
        return None
    if not any(shares):
        return "no replay"
    drawn = " falling to " if shares[-1] < shares[0] else " rising to "
    unit, sampler = stored(config, "replay.unit", str), stored(config, "replay.sampler", str)
    words = "replay " + drawn.join(number(share, percent=True) for share in dict.fromkeys(shares))
    words += f", unit {unit}" if unit not in (None, "any") else ""
    words += f", {sampler} sampler" if sampler else ""
    return words + (", observed only" if stored(config, "replay.mode", str) == "observe" else "")


def _shares(config: Config) -> tuple[float, float] | None:
    """Replay's share of the first and of the last batch."""
    fraction, iterations = stored(config, "replay.fraction", float), stored(config, "run.iterations", int)
    if fraction is None or iterations is None:
        return None
    try:
        schedule = Schedule.model_validate(stored(config, "replay.schedule", dict) or {})
    except ValueError:
        return None  # another version's words
    return schedule.at(fraction, 1, iterations), schedule.at(fraction, iterations, iterations)
