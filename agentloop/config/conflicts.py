"""Settings that can't stand together, in two tables: what has no effect without another, and what another rules out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from agentloop.config.sections.model import MODEL_DEFAULTS
from agentloop.config.strict_yaml import shown
from replay.setting_types import Section

if TYPE_CHECKING:
    from agentloop.config import RunConfig

COMPARING = ("dr_grpo", "grpo", "opo", "rloo")
"""Algorithms by which the members of a group are compared with each other, and one of equal rewards has no signal."""


class Values(NamedTuple):
    """What a setting may be: in words, and whether a value is one of them."""

    words: str
    hold: Callable[[Any], bool]


def _one_of(*values: object) -> Values:
    *most, last = map(shown, values)
    return Values(f"{', '.join(most)} or {last}" if most else last, lambda value: value in values)


def _not(*values: object, words: str = "given") -> Values:
    return Values(words, lambda value: value not in values)


_SET, _FILLED, _BEHAVIOR = _not(None), _not(()), _one_of("behavior")
_LOSSES = ("loss.fresh", "loss.replay", "loss.hinted")
_BY_TURNS = ("grpo", "dr_grpo", "rloo", "reinforce", "reinforce++")
_EACH_TURN = _one_of("turn", "state")
_TWICE = "Drift would count twice: set the anchor to old."

NO_EFFECT: tuple[tuple[str, str, Values], ...] = (
    ("advantage.turn_gamma advantage.turn_coef", "advantage.credit", _EACH_TURN),
    ("advantage.state_max_age", "advantage.credit", _one_of("state")),
    ("collection.max_staleness collection.samples_per_insert", "collection.by", _one_of("workers")),
    ("critic", "algorithm", _one_of("ppo")),
    ("critic.value_coef", "critic.backbone", _one_of("shared")),
    ("engine.options engine.memory_share engine.transfer", "engine.serve", _one_of(True)),
    ("engine.urls engine.serve", "rollout.engine", _one_of("vllm")),
    ("environment.tools", "environment.name", _one_of("rows")),
    ("kl.horizon", "kl.target", _SET),
    ("lora.alpha lora.target_modules", "lora.rank", _not(0)),
    ("loss.hinted", "context.strategy", _one_of("hint")),
    ("loss.norm_length", "loss.aggregation", _one_of("seq-mean-token-sum-norm")),
    ("replay.restarts.fraction", "replay.restarts.enable", _one_of(True)),
    ("optimizer.betas", "optimizer.name", _one_of("adamw", "muon")),
    ("optimizer.momentum", "optimizer.name", _one_of("sgd", "muon")),
    ("critic.optimizer.betas", "critic.optimizer.name", _one_of("adamw", "muon")),
    ("critic.optimizer.momentum", "critic.optimizer.name", _one_of("sgd", "muon")),
    ("replay.weight", "loss.normalise", _one_of("per_stream")),
    ("reward.parallel reward.timeout_s reward.on_error", "reward.functions", _FILLED),
    ("reward.overlong", "reward.overlong.buffer", _SET),
    ("tasks.split tasks.held_out", "tasks.data", _SET),
    ("tasks.subset tasks.revision", "tasks.data", Values("hf:NAME", lambda data: str(data).startswith("hf:"))),
)
"""Keys, or sections of them, that mean nothing unless the other key is one of these."""

_PPO, _ROWS, _SERVE, _WORKERS = _one_of("ppo"), _one_of("rows"), _one_of(True), _one_of("workers")
_FALSE, _NULL, _STORED, _TRAJECTORY, _ZERO = map(_one_of, (False, None, "stored", "trajectory", 0))
_NO_TURN = _one_of("trajectory", "state")
_UNCOMPARED, _POSITIVE, _ANOTHER = _not(*COMPARING), _not(0, words="above 0"), "another one"
_OWN_MEANS, _WHOLE = _one_of("split", "fresh_only"), _one_of("stored", "shared", "split")
_IMPORTANCE, _EXGRPO = _one_of("importance"), _one_of("exgrpo")
_ALONE, _NORMED = _one_of("reinforce", "remax", "ppo"), _one_of("seq-mean-token-sum-norm")
_TEACHES = f"Groups of equal rewards lack a signal by {', '.join(COMPARING)} alone: use one of these, or remove it."
_CRITIC, _LOOP = "The critic of ppo gives the advantages: remove it.", "Remove it, or set collection.by: loop."
_MEANS = "Fresh and replayed have their own means: use shared."
_AUTOCAST = "Autocast is for float32 weights: remove one of them."
_CORRECTED = "Importance weights correct these: use one of them."
_ITS_RATIO = "exgrpo's ratio is to the behavior policy: set it."
_STD, _ROUNDS, _FUNCTION = "advantage.normalise_std", "rollout.dynamic_sampling_rounds", "advantage.function"
_INSERT, _RESTARTS, _ON = "collection.samples_per_insert", "replay.restarts.enable", _one_of(True)
EXCLUDED: tuple[tuple[str, Values, str, Values, str], ...] = (
    ("algorithm", _one_of("grpo"), _FUNCTION, _SET, "The function takes its place: remove one of them."),
    ("algorithm", _not("remax", words=_ANOTHER), "collection.by", _WORKERS, "Use grpo."),
    (_STD, _NULL, _FUNCTION, _SET, "The function's numbers are taken as they are: remove it."),
    (_STD, _NULL, "algorithm", _one_of("reinforce++"), "It divides by the iteration's: use reinforce."),
    (_STD, _NULL, "algorithm", _one_of("reinforce++_baseline"), "Use dr_grpo, which doesn't divide."),
    (_STD, _one_of(None, False), "algorithm", _not("grpo", "ppo"), "Only grpo has it: use advantage.normalise_batch."),
    ("advantage.normalise_batch", _one_of("none"), "algorithm", _PPO, _CRITIC),
    ("advantage.credit", _NO_TURN, _FUNCTION, _SET, "A function has no baseline for a turn: remove one of them."),
    ("advantage.credit", _TRAJECTORY, "algorithm", _PPO, _CRITIC),
    ("advantage.credit", _NO_TURN, "algorithm", _not(*_BY_TURNS), f"Use {', '.join(_BY_TURNS)}."),
    (_ROUNDS, _ZERO, "algorithm", _UNCOMPARED, _TEACHES),
    (_ROUNDS, _ZERO, "advantage.credit", _EACH_TURN, "Groups of equal rewards teach by their turns: remove it."),
    (_ROUNDS, _ZERO, "replay.unit", _one_of("trajectory", "task"), "Replayed rows are of planned tasks: use unit any."),
    (_ROUNDS, _ZERO, "collection.by", _WORKERS, _LOOP),
    ("rollout.engine", _one_of("vllm"), "collection.by", _WORKERS, "Workers sample from vLLM's engines alone."),
    ("replay.complete_zero_variance", _FALSE, "algorithm", _UNCOMPARED, _TEACHES),
    ("replay.complete_zero_variance", _FALSE, "replay.baseline", _OWN_MEANS, _MEANS),
    ("replay.baseline", _STORED, "algorithm", _ALONE, "No trajectory is compared with others: remove it."),
    ("replay.baseline", _WHOLE, _FUNCTION, _SET, "The function is given whole groups: use one of these."),
    ("replay.negative_weight", _one_of(1.0), "algorithm", _PPO, _CRITIC),
    ("replay.mode", _one_of("train"), _INSERT, _SET, "Updates without new rows learn from replayed ones."),
    ("replay.unit", _one_of("any", "group"), _INSERT, _SET, "Others replay with fresh rows, of which there are none."),
    ("replay.redact", _NULL, "collection.by", _WORKERS, _LOOP),
    ("replay.redact", _NULL, "advantage.credit", _one_of("state"), "States are read off messages as they were."),
    ("collection.by", _one_of("loop"), _RESTARTS, _ON, "Workers begin at the start."),
    ("environment.agent", _NULL, _RESTARTS, _ON, "A program of its own is not brought to where another one was."),
    ("context.strategy", _one_of("linear"), _RESTARTS, _ON, "Others may rewrite what was seen."),
    ("replay.mode", _one_of("train"), _RESTARTS, _ON, "Observed rows change nothing."),
    ("replay.unit", _one_of("any", "group"), _RESTARTS, _ON, "Others replay with tasks that come from the start."),
    ("replay.baseline", _STORED, _RESTARTS, _ON, "Only members of a group went on from the same place."),
    ("replay.complete_zero_variance", _FALSE, _RESTARTS, _ON, "Only its members went on from the same place."),
    ("replay.retire_solved", _NULL, _RESTARTS, _ON, "Successes behind a prefix would count."),
    ("algorithm", _not("remax", words=_ANOTHER), _RESTARTS, _ON, "Its greedy episodes begin at the start."),
    ("algorithm", _not("opo", words=_ANOTHER), _RESTARTS, _ON, "Its baseline would count kept tokens."),
    ("algorithm", _not("reinforce++", words=_ANOTHER), _RESTARTS, _ON, "It compares with episodes from the start."),
    ("collection.max_staleness", _POSITIVE, _INSERT, _SET, "Each update makes waiting rows older: raise it."),
    ("collection.by", _one_of("loop"), "engine.serve", _SERVE, "Or start agentloop engine, and set engine.urls."),
    ("tasks.data", _SET, "environment.name", _ROWS, "Its rows are the tasks."),
    ("tasks.data", _SET, "environment.agent", _SET, "Its rows are the agent's tasks."),
    ("reward.functions", _FILLED, "environment.name", _ROWS, "The first one says what a success is."),
    ("reward.environment", _one_of(1.0), "environment.name", _ROWS, "Rows have no score of their own: remove it."),
    ("engine.urls", _one_of(()), "engine.serve", _SERVE, "The run starts its own: remove one of them."),
    ("evaluation.samples", _one_of(1), "evaluation.temperature", _ZERO, "At temperature 0 all samples are the same."),
    ("compute.autocast", _one_of("auto", "none"), "model.dtype", _not("float32"), _AUTOCAST),
    ("kl.loss_estimator", _one_of("k1", "k3"), "kl.loss_gradient", _IMPORTANCE, _CORRECTED),
    ("kl.reward_coef", _POSITIVE, "kl.target", _SET, "The adaptive coefficient begins with it: set it."),
    ("loss.norm_length", _SET, "loss.aggregation", _NORMED, "It is the divisor: set it, e.g. to the longest row."),
    *((f"{loss}.anchor", _BEHAVIOR, f"{loss}.objective.name", _EXGRPO, _ITS_RATIO) for loss in _LOSSES),
    *((f"{loss}.correction.kind", _one_of("none"), f"{loss}.anchor", _BEHAVIOR, _TWICE) for loss in _LOSSES),
    *((f"{loss}.correction.kind", _not("v_trace", words=_ANOTHER), "algorithm", _PPO, _CRITIC) for loss in _LOSSES),
    ("environment.task_pool", _one_of("unlimited"), "tasks.data", _SET, "The rows are the pool: remove one of them."),
)
"""A key, what it must be, when the other key is so, and why or what to do instead."""


def check_conflicts(config: RunConfig) -> None:
    """Raises ValueError for the first pair of settings that can't stand together."""
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
