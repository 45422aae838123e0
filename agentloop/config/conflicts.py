"""Settings that conflict, in two tables: settings without effect unless another is set, and settings that exclude
others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from agentloop.algorithms.catalog import ALGORITHMS, OBJECTIVES, algorithms_where
from agentloop.algorithms.declarations import Algorithm
from agentloop.config.sections.model import MODEL_DEFAULTS
from agentloop.config.strict_yaml import shown
from replay.setting_types import Section

if TYPE_CHECKING:
    from agentloop.config import RunConfig


class Values(NamedTuple):
    """The values that a setting may have: a description in words, and a test of a value."""

    words: str
    hold: Callable[[Any], bool]


def _other_than(*values: object, words: str = "another one") -> Values:
    return Values(words, lambda value: value not in values)


def _values(given: object) -> Values:
    """Make `Values` of a list of allowed values, or of the only allowed value."""
    if isinstance(given, Values):
        return given
    values = given if isinstance(given, list) else [given]
    *most, last = map(shown, values)
    return Values(f"{', '.join(most)} or {last}" if most else last, lambda value: value in values)


GIVEN, LISTED = _other_than(None, words="given"), _other_than((), words="given")
ABOVE_0 = _other_than(0, words="above 0")

_ACTING: tuple[tuple[str, str, object], ...] = (
    ("advantage.turn_gamma advantage.turn_coef", "advantage.credit", "turn"),
    ("collection.max_staleness", "collection.by", "workers"),
    ("critic", "algorithm", algorithms_where(lambda each: each.needs_critic)),
    ("engine.options engine.memory_share engine.transfer", "engine.serve", True),
    ("engine.urls engine.serve", "rollout.engine", "vllm"),
    ("environment.tools environment.respond environment.call_tool", "environment.name", "rows"),
    ("lora.alpha lora.target_modules", "lora.rank", ABOVE_0),
    ("loss.hinted", "context.strategy", "hint"),
    ("loss.norm_length", "loss.aggregation", "seq-mean-token-sum-norm"),
    ("optimizer.betas", "optimizer.name", ["adamw", "muon"]),
    ("optimizer.momentum", "optimizer.name", ["sgd", "muon"]),
    ("critic.optimizer.betas", "critic.optimizer.name", ["adamw", "muon"]),
    ("critic.optimizer.momentum", "critic.optimizer.name", ["sgd", "muon"]),
    ("replay.weight", "loss.normalise", "per_stream"),
    ("reward.parallel reward.timeout_s reward.on_error", "reward.functions", LISTED),
    ("tasks.split tasks.held_out", "tasks.data", GIVEN),
    ("tasks.subset tasks.revision", "tasks.data", Values("hf:NAME", lambda data: str(data).startswith("hf:"))),
)
NO_EFFECT = tuple((keys, other, _values(acting)) for keys, other, acting in _ACTING)
"""Keys, or sections of them, that mean nothing unless the other key is one of these."""

Rule = tuple[str, object, str, object, str]
"""A key, what it must be, when the other key is so, and why or what to do instead."""
_LOSSES = ("loss.fresh", "loss.replay", "loss.hinted")
_LOOP = "Remove it, or set collection.by: loop."
_NO_BASELINE = "A function has no baseline for a turn: remove one of them."
_WHOLE_GROUPS = "The function is given whole groups: use one of these."
_AUTOCAST = "Autocast is for float32 weights: remove one of them."
_CORRECTED = "Importance weights correct these: use one of them."
_DIVISOR = "It is the divisor: set it, e.g. to the longest row."
_ITS_RATIO = "The objective's ratio is to that policy: set it."
_TWICE = "Drift would count twice: set the anchor to old."


def _rules_of_algorithm(each: Algorithm) -> Iterator[Rule]:
    """Yield the settings that an algorithm refuses, by its declaration."""
    same, critic = ("algorithm", each.name), f"The critic of {each.name} gives the advantages: remove it."
    if each.needs_critic:
        yield "advantage.normalise_batch", "none", *same, critic
    if not each.credits_turns:
        others = ", ".join(algorithms_where(lambda other: other.credits_turns))
        yield "advantage.credit", "trajectory", *same, critic if each.needs_critic else f"Use {others}."
    if not each.skips_equal_groups:
        names = ", ".join(algorithms_where(lambda other: other.skips_equal_groups))
        advice = f"Groups of equal rewards lack a signal by {names} alone: use one of these, or remove it."
        yield "rollout.dynamic_sampling_rounds", 0, *same, advice
    if not each.compares_members:
        yield "replay.baseline", "stored", *same, "No trajectory is compared with others: remove it."
    if each.greedy_episodes:
        yield "algorithm", _other_than(each.name), "collection.by", "workers", "Use grpo."


_ROUNDS, _FUNCTION = "rollout.dynamic_sampling_rounds", "advantage.function"
_RULES: tuple[Rule, ...] = (
    ("algorithm", "grpo", _FUNCTION, GIVEN, "The function takes its place: remove one of them."),
    ("advantage.credit", "trajectory", _FUNCTION, GIVEN, _NO_BASELINE),
    ("replay.baseline", ["stored", "shared", "split"], _FUNCTION, GIVEN, _WHOLE_GROUPS),
    *(rule for algorithm in ALGORITHMS.values() for rule in _rules_of_algorithm(algorithm)),
    (_ROUNDS, 0, "advantage.credit", "turn", "Groups of equal rewards teach by their turns: remove it."),
    (_ROUNDS, 0, "replay.unit", ["trajectory", "task"], "Replayed rows are of planned tasks: use unit any."),
    (_ROUNDS, 0, "collection.by", "workers", _LOOP),
    ("rollout.engine", "vllm", "collection.by", "workers", "Workers sample from vLLM's engines alone."),
    ("replay.redact", None, "collection.by", "workers", _LOOP),
    ("collection.by", "loop", "engine.serve", True, "Or start agentloop engine, and set engine.urls."),
    ("engine.urls", (), "engine.serve", True, "The run starts its own: remove one of them."),
    ("tasks.data", GIVEN, "environment.name", "rows", "Its rows are the tasks."),
    ("tasks.data", GIVEN, "environment.agent", GIVEN, "Its rows are the agent's tasks."),
    ("environment.task_pool", "unlimited", "tasks.data", GIVEN, "The rows are the pool: remove one of them."),
    ("reward.functions", LISTED, "environment.name", "rows", "The first one says what a success is."),
    ("reward.environment", 1.0, "environment.name", "rows", "Rows have no score of their own: remove it."),
    ("evaluation.samples", 1, "evaluation.temperature", 0, "At temperature 0 all samples are the same."),
    ("compute.autocast", ["auto", "none"], "model.dtype", _other_than("float32"), _AUTOCAST),
    ("kl.loss_estimator", ["k1", "k3"], "kl.loss_gradient", "importance", _CORRECTED),
    ("loss.norm_length", GIVEN, "loss.aggregation", "seq-mean-token-sum-norm", _DIVISOR),
    *(
        (f"{loss}.anchor", each.anchor, f"{loss}.objective.name", name, _ITS_RATIO)
        for name, each in OBJECTIVES.items()
        for loss in _LOSSES
        if each.anchor is not None
    ),
    *((f"{loss}.correction.kind", "none", f"{loss}.anchor", "behavior", _TWICE) for loss in _LOSSES),
)
EXCLUDED = tuple((key, _values(allowed), other, _values(ruling), why) for key, allowed, other, ruling, why in _RULES)
"""Pairs of settings that can't stand together."""


def check_conflicts(config: RunConfig) -> None:
    """Raises ValueError for the first pair of settings that conflict."""
    for keys, other, acting in NO_EFFECT:
        if not acting.hold(value := _value(config, other)):
            for key in keys.split():
                check_default(config, key, when=f"{other} is {shown(value)}")
    for key, allowed, other, ruling, why in EXCLUDED:
        found, value = _value(config, key), _value(config, other)
        if ruling.hold(value) and value is not None and not allowed.hold(found):
            raise ValueError(f"{key} must be {allowed.words} when {other} is {shown(value)}, got {shown(found)}. {why}")


def check_default(config: RunConfig, path: str, *, when: str) -> None:
    """Raises ValueError where a key, or one of a section, was set although it changes nothing."""
    for key, given, default in _changed(config, tuple(path.split("."))):
        raise ValueError(
            f"{key} must be left at {shown(default)} when {when}, got {shown(given)}. It would change nothing: "
            "remove it."
        )


def _value(config: Any, path: str) -> Any:
    """The value at a dotted path; None where a section above it is."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def _changed(config: RunConfig, path: tuple[str, ...]) -> Iterator[tuple[str, Any, Any]]:
    """Key, value and default of what differs at a path or below."""
    section, given = _value(config, ".".join(path[:-1])) if path[:-1] else config, _value(config, ".".join(path))
    default = type(section).model_fields[path[-1]].get_default(call_default_factory=True)
    if isinstance(default, Section):
        for name in type(given).model_fields:
            yield from _changed(config, (*path, name))
    elif given not in (default, MODEL_DEFAULTS.get(path, default)):
        yield ".".join(path), given, default
