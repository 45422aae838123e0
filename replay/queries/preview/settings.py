"""Replay settings as people choose them, on top of a run's own: checked field by field, and told as YAML."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from replay import declared
from replay.mixing.rule import Mode, Unit
from replay.sampling.samplers import SAMPLERS, RankedSampler, Sampler, make_sampler

UNITS: tuple[str, ...] = typing.get_args(Unit)
MODES: tuple[str, ...] = typing.get_args(Mode)
CONTROLS = ("fraction", "unit", "task_members", "sampler", "successful_only", "max_staleness", "max_uses", "mode")
"""Keys of `replay` that are chosen. Besides, `SAMPLER.OPTION` is an option of that sampler."""
_CLOSE = 5e-4
"""A fraction within this of the scheduled one is the scheduled one: people see three decimals."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, whole: what was not chosen is the run's own."""

    config: declared.Config
    """What the next batch is planned by: its fraction is that of the next iteration."""
    yaml: str
    """The part `replay` of a configuration, of what was chosen and what the run has other than the defaults."""
    errors: Mapping[str, str]
    """By control, or `sampler_options`; with one, the rest is as far as it could be understood."""


def choose(stored: declared.Config, given: Mapping[str, str], *, scheduled: float) -> Choice:
    """`stored` is the run's own configuration, `scheduled` its fraction for the next iteration.

    Values are texts as a form or a command line has them; an empty one is null.
    """
    replay, errors = dict(stored["replay"]), dict[str, str]()
    for name, read in _READERS.items():
        if name in given:
            try:
                replay[name] = read(f"replay.{name}", given[name].strip())
            except ValueError as error:
                errors[name] = str(error)
    keeps_schedule = "fraction" not in given or "fraction" in errors or abs(replay["fraction"] - scheduled) < _CLOSE
    replay["fraction"] = stored["replay"]["fraction"] if keeps_schedule else replay["fraction"]
    if replay["unit"] != "task":
        replay["task_members"] = None
    replay["sampler_options"] = _options(replay["sampler"], stored["replay"], given)
    constant = declared.DEFAULTS["replay"]["schedule"]
    told = replay if keeps_schedule else {**replay, "schedule": constant}
    now = {**replay, "fraction": scheduled if keeps_schedule else replay["fraction"], "schedule": constant}
    config = {**stored, "replay": now}
    if not errors:
        errors |= _mistakes(config)
    was_scheduled = stored["replay"]["schedule"] != constant
    text = _yaml(told, ends_schedule=was_scheduled and not keeps_schedule, now=now["fraction"])
    return Choice(config, text, errors)


def sampler_of(config: declared.Config, seed: int) -> Sampler:
    """A built-in one; raises ValueError for what it refuses."""
    replay = config["replay"]
    return make_sampler(replay["sampler"], seed, replay["sampler_options"])


def options_of(sampler: str) -> list[dict[str, Any]]:
    """Name, default and, where there are some, choices of each option of a built-in sampler."""
    kind = SAMPLERS[sampler].Options
    types = typing.get_type_hints(kind)
    made = kind()
    return [
        {
            "name": field.name,
            "default": getattr(made, field.name),
            "choices": list(typing.get_args(types[field.name]))
            if typing.get_origin(types[field.name]) is Literal
            else None,
        }
        for field in fields(kind)
    ]


def _options(sampler: str, stored: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    options = dict(stored["sampler_options"]) if sampler == stored["sampler"] else {}
    for name, text in given.items():
        kind, _, option = name.partition(".")
        if kind == sampler and option:
            options[option] = _scalar(text.strip())
    return options


def _scalar(text: str) -> Any:
    """As YAML would read it, more or less: the options' own types say whether it fits. What is no JSON is a text."""
    if text in ("", "null"):
        return None
    try:
        value = json.loads(text)
        # NaN, and numbers that are too large to be told from infinity, can't be part of an answer.
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


def _mistakes(config: declared.Config) -> dict[str, str]:
    """What does not go together, by the control that it is told beside."""
    replay = config["replay"]
    if replay["sampler"] not in SAMPLERS:
        own = f"replay.sampler must be a built-in one to be tried out without running its file, got {replay['sampler']}"
        return {"sampler": f"{own}. Choose one of {', '.join(SAMPLERS)}."}
    try:
        sampler = sampler_of(config, 0)
        if isinstance(sampler, RankedSampler) and sampler.measured:
            raise ValueError(
                "replay.sampler_options.policy must be stored to be tried out, for no policy is loaded, got current."
            )
        declared.check(config)
    except ValueError as error:
        found = re.match(r"replay\.(\w+)", str(error))
        name = found[1] if found else "unit"
        return {name if name in (*CONTROLS, "sampler_options") else "unit": str(error)}
    return {}


def _fraction(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be a number from 0 to 1, got {_shown(text)}.")
    return value


def _whole(least: int) -> Callable[[str, str], int | None]:
    def read(name: str, text: str) -> int | None:
        if text in ("", "null"):
            return None
        if not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text) >= least):
            raise ValueError(f"{name} must be a whole number of at least {least}, or empty, got {_shown(text)}.")
        return int(text)

    return read


def _one_of(known: tuple[str, ...]) -> Callable[[str, str], str]:
    def read(name: str, text: str) -> str:
        if text not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {_shown(text)}.")
        return text

    return read


def _truth(name: str, text: str) -> bool:
    return _one_of(("true", "false"))(name, text) == "true"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "...")


_READERS: dict[str, Callable[[str, str], Any]] = {
    "fraction": _fraction,
    "unit": _one_of(UNITS),
    "task_members": _whole(1),
    "sampler": _one_of(tuple(SAMPLERS)),
    "successful_only": _truth,
    "max_staleness": _whole(0),
    "max_uses": _whole(1),
    "mode": _one_of(MODES),
}


def _yaml(replay: Mapping[str, Any], *, ends_schedule: bool, now: float) -> str:
    """What was chosen, and whatever else is not the default; `now` is the fraction of the next iteration."""
    defaults = declared.DEFAULTS["replay"]
    lines = ["replay:"]
    for name in (*CONTROLS, *(name for name in defaults if name not in CONTROLS)):
        value, default = replay[name], defaults[name]
        if isinstance(default, dict) and default:
            value = {key: part for key, part in value.items() if key not in default or part != default[key]}
            default = {}
        always = name in CONTROLS and name != "task_members"
        if name == "schedule" and ends_schedule:
            lines.append("  schedule: {shape: constant}")
        elif name == "fraction" and abs(value - now) >= _CLOSE:
            lines.append(f"  fraction: {_flow(value)}  # {now:.3f} in the next iteration, by the schedule")
        elif always or value != default:
            lines.append(f"  {name}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str) and re.fullmatch(r"[a-z_]{2,}", value) and value not in _WORDS:
        return value
    text = json.dumps(value)
    # YAML 1.1 takes 1e-05 for a text.
    return re.sub(r"^(-?\d+)e", r"\1.0e", text) if isinstance(value, float) else text


_WORDS = ("null", "true", "false", "yes", "no", "on", "off")
