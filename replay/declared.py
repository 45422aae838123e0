"""What a run's configuration declares about its batches: the rule, the limits, and what does not go together.

It is read from plain values, as they stand in a run's stored configuration, so that the buffer alone can tell what
would become of other ones. `agentloop.config` gives the values of a configuration that is to be run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replay.mixing.request import Limits
from replay.mixing.rule import SAME_TASK, EssRule, MixRule, StartRule
from replay.mixing.schedule import Schedule
from replay.sampling.samplers import SAMPLERS, RankedSampler

Config = Mapping[str, Any]
"""A run's configuration or the parts of it in DEFAULTS, as nested mappings."""

_LIMITS = Limits()
_START, _ESS = StartRule(), {"weights": "token", "floor": 0.5, "lower_by": 0.5, "raise_by": 1.1, "least": 0.1}
DEFAULTS: dict[str, dict[str, Any]] = {
    "run": {"iterations": 60, "seed": 0},
    "environment": {"task_pool": "unlimited"},
    "tasks": {"data": None},
    "batch": {"trajectories": 128, "group_size": 8},
    "replay": {
        "fraction": 0.0,
        "schedule": {"shape": "constant", "final": None, "over": "progress", "begin": None, "end": None, "steps": []},
        "start": vars(_START),
        "controller": "none",
        "ess": _ESS,
        "mode": "train",
        "unit": "any",
        "task_members": None,
        "shortfall": "fresh",
        "complete_zero_variance": False,
        "sampler": "success",
        "sampler_options": {},
        **(vars(_LIMITS) | {"successful_only": True, "sources": {}, "allow_mismatch": []}),
    },
}
"""What is read here, with the values of keys that a configuration does not mention."""


def completed(config: Config) -> dict[str, dict[str, Any]]:
    """The parts of a configuration that are read here, whole: a run's may be from before some key was known."""
    found = {}
    for part, defaults in DEFAULTS.items():
        given = config.get(part) or {}
        found[part] = {name: given.get(name, default) for name, default in defaults.items()}
    for name in ("schedule", "start", "ess"):
        found["replay"][name] = {**DEFAULTS["replay"][name], **found["replay"][name]}
    return found


def mix_rule(config: Config) -> MixRule:
    """The declared composition of the run's batches."""
    replay, batch = config["replay"], config["batch"]
    return MixRule(
        trajectories=batch["trajectories"],
        group_size=batch["group_size"],
        fraction=_course(replay["fraction"], replay["schedule"], config["run"]["iterations"]),
        unit=replay["unit"],
        task_members=replay["task_members"] or 0,
        sources=replay["sources"],
        start=StartRule(**replay["start"]),
        controller=_controller(replay["ess"]) if replay["controller"] == "ess" else None,
        shortfall=replay["shortfall"],
        mode=replay["mode"],
    )


def _controller(ess: Mapping[str, Any]) -> EssRule:
    """Whose ratios an ESS is over is the update's business, which gives it."""
    return EssRule(**{name: value for name, value in ess.items() if name != "weights"})


def _course(fraction: float, schedule: Mapping[str, Any], iterations: int) -> Schedule:
    over, begin, end, final = (schedule[name] for name in ("over", "begin", "end", "final"))
    first, last = (0.0, 1.0) if over == "progress" else (1.0, float(iterations))
    begin, end = (first if begin is None else begin), (last if end is None else end)
    steps = tuple((float(place), float(share)) for place, share in schedule["steps"])
    final = fraction if final is None else final
    return Schedule(fraction, schedule["shape"], final, over, begin, max(begin, end), steps)


def limits(replay: Mapping[str, Any]) -> Limits:
    """Which rows a draw may take at all, of the configuration's part `replay`."""
    declared = {name: replay[name] for name in vars(_LIMITS)}
    declared |= {"sources": tuple(replay["sources"]) or None, "allow_mismatch": tuple(replay["allow_mismatch"])}
    return Limits(**declared)


def check(config: Config) -> None:
    """Raises ValueError where the parts of a configuration can't be mixed as asked."""
    replay, batch = config["replay"], config["batch"]
    _check_sources(replay["sources"])
    if replay["unit"] != "any" and batch["trajectories"] % batch["group_size"]:
        raise ValueError(
            f"batch.trajectories must be a multiple of batch.group_size ({batch['group_size']}) when replay.unit "
            f"is {replay['unit']}, got {batch['trajectories']}. Change one of them, or set replay.unit: any."
        )
    if replay["unit"] == "group":
        _check_whole_groups(replay, batch["group_size"])
        _check_ranks_nothing(replay)
    if replay["unit"] in SAME_TASK:
        check_task_pool(config, f"replay.unit is {replay['unit']}")
    if replay["complete_zero_variance"]:
        _check_completion(config)
    _check_task_members(config)


def _check_sources(shares: Mapping[str, float]) -> None:
    if shares and (min(shares.values()) <= 0 or abs(sum(shares.values()) - 1) > 1e-6):
        raise ValueError(
            f"replay.sources must have shares above 0 that sum to 1, got {dict(shares)}. "
            "They divide the replayed rows; replay.fraction says how many there are."
        )


def _check_whole_groups(replay: Mapping[str, Any], group_size: int) -> None:
    for name in ("per_task", "per_group"):
        most = replay[name]
        if most is not None and most < group_size:
            raise ValueError(
                f"replay.{name} must be at least batch.group_size ({group_size}) when replay.unit is "
                f"group, whose groups are drawn whole, got {most}. Raise it, or leave it out."
            )
    if replay["successful_only"]:
        raise ValueError(
            "replay.successful_only must be false when replay.unit is group, whose members are drawn whole, got true. "
            "Set replay.successful_only: false."
        )


def _check_ranks_nothing(replay: Mapping[str, Any]) -> None:
    kind = SAMPLERS.get(replay["sampler"])
    ranks = kind is not None and issubclass(kind, RankedSampler) and replay["sampler_options"].get("mode") != "random"
    if ranks:
        raise ValueError(
            f"replay.sampler must weigh rows when replay.unit is group, got {replay['sampler']}, which ranks them. "
            "Use another sampler, or replay.unit: any."
        )


def check_task_pool(config: Config, when: str) -> None:
    """Raises ValueError where no task comes twice."""
    if config["environment"]["task_pool"] == "unlimited" and config["tasks"]["data"] is None:
        raise ValueError(
            f"environment.task_pool must be a number when {when}, got unlimited: no task comes twice, so none is ever "
            "in the buffer when it comes. Set it, for example to 500, or name rows with tasks.data."
        )


def _check_completion(config: Config) -> None:
    replay = config["replay"]
    if replay["mode"] == "observe" or replay["unit"] == "group":
        key, value = ("mode", "observe") if replay["mode"] == "observe" else ("unit", "group")
        raise ValueError(
            f"replay.complete_zero_variance must be false when replay.{key} is {value}, got true. "
            "Only single rows that are trained on can complete a group."
        )
    check_task_pool(config, "replay.complete_zero_variance is true")


def _check_task_members(config: Config) -> None:
    replay, size = config["replay"], config["batch"]["group_size"]
    members = replay["task_members"]
    if replay["unit"] != "task":
        if members is not None:
            raise ValueError(
                f"replay.task_members must be left out when replay.unit is {replay['unit']}, got {members}. "
                "Remove it, or set replay.unit: task."
            )
        return
    if members is None or members > size:
        raise ValueError(
            f"replay.task_members must be a number from 1 to batch.group_size ({size}) when replay.unit is task, "
            f"got {'null' if members is None else members}. Set how many members of a mixed "
            "group are replayed."
        )
    highest = mix_rule(config).fraction.highest
    if highest * size > members + 1e-9:
        raise ValueError(
            f"replay.task_members must be at least replay.fraction x batch.group_size ({highest:g} x {size}), got "
            f"{members}: with every group mixed, that many of {size} are all there is. Raise it, or lower "
            "replay.fraction."
        )
