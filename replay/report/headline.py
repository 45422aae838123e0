"""What a stored configuration says, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replay.mixing.schedule import Schedule
from replay.records import stored_setting as stored
from replay.report.svg import number

Config = Mapping[str, Any]
"""A run's configuration as it is stored."""


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
    length = stored(config, "run.schedule_iterations", int) or iterations
    return schedule.at(fraction, 1, length), schedule.at(fraction, iterations, length)
