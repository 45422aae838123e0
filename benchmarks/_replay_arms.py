"""What the study compares: tasks, contenders with the settings they are tuned over, and the arms made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

Values = Mapping[str, object]
"""Of the configuration, by dotted key."""

BUDGET, TUNING_BUDGET = 5120, 2560
"""Fresh episodes after which a run that has not reached the target is over."""
TARGET = 0.9
"""Held-out success to reach in two evaluations in a row."""
SEEDS, TUNING_SEEDS = tuple(range(10)), (100, 101, 102)
STARTS = 5
"""Start models: seed s begins with number s modulo this; tuning with one of its own."""
KEPT = (12, 4, 2)
"""Settings tried on the first, second and third tuning seed: the best of those before."""


@dataclass(frozen=True)
class StudyTask:
    title: str
    values: Values = field(default_factory=dict)
    start: str = ""
    """The task whose warmed-up models it begins with; empty: its own."""
    tuned_as: str = ""
    """The task whose tuned settings it has; empty: its own."""


_CARELESS = {"hops": [2, 5], "p_next": 0.4, "p_stop": 0.4}
_SPARSE: Values = {"environment.options.hops": [3, 6], "warm_up.options": _CARELESS}
_FETCH: Values = {
    "environment.name": f"{Path(__file__).parents[1] / 'examples' / 'fetch_place.py'}:FetchPlace",
    "warm_up.updates_after_target": 400,
    "rollout.max_tokens_per_turn": 64,  # twice what any right reply takes: an iteration waits for one that rambles
}
_CARELESS_FETCH = {"p_take": 0.3, "p_goal": 0.3, "p_put": 0.3}

_OWN = {
    "dense": StudyTask("look-ups, 2 to 5 hops"),
    "sparse": StudyTask("look-ups, 3 to 6 hops", _SPARSE),
    "very_sparse": StudyTask("look-ups, 6 to 8 hops", {"environment.options.hops": [6, 8]}, "sparse"),
    "fetch": StudyTask("fetch and place", _FETCH),
    "fetch_rare": StudyTask("fetch and place, rarer successes", {**_FETCH, "warm_up.options": _CARELESS_FETCH}),
}
MAIN_TASKS = tuple(_OWN)


def _slow(name: str) -> StudyTask:
    """With tools that take 50 ms."""
    task = _OWN[name]
    values = {**task.values, "environment.options.delay_s": 0.05}
    return StudyTask(f"{task.title}, 50 ms a call", values, task.start or name, name)


TASKS = {**_OWN, **{f"{name}_50ms": _slow(name) for name in MAIN_TASKS}}
_SLOW_TOOLS = tuple(name for name in TASKS if name not in _OWN)
_LOOK_UPS = ("dense", "sparse", "very_sparse")


@dataclass(frozen=True)
class Setting:
    """What is tuned."""

    batch: int
    """Fresh episodes per iteration."""
    epochs: int
    learning_rate: float

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.epochs}@{self.learning_rate:g}"


_SETTINGS = (Setting(*values) for values in product((32, 64), (1, 2, 4), (0.7e-3, 1.5e-3)))
SETTINGS = {setting.name: setting for setting in _SETTINGS}


def _on_policy(setting: Setting) -> Values:
    """One optimizer step per epoch."""
    return {
        "batch.trajectories": setting.batch,
        "batch.mini_batch": setting.batch,
        "batch.ppo_epochs": setting.epochs,
        "optimizer.learning_rate": setting.learning_rate,
    }


def _with_replay(setting: Setting) -> Values:
    """As many replayed rows as fresh ones, in as many optimizer steps; fewer while the buffer has fewer."""
    doubled = {"batch.trajectories": 2 * setting.batch, "batch.mini_batch": 2 * setting.batch}
    return {**_on_policy(setting), **doubled, "replay.fraction": 0.5, "replay.shortfall": "shrink"}


def _hindsight(setting: Setting) -> Values:
    own = {"replay.sources": {"hindsight": 1.0}, "replay.sampler": "uniform", "replay.hindsight.enable": True}
    return {**_with_replay(setting), **own}


CONTENDERS: Mapping[str, Callable[[Setting], Values]] = {
    "on_policy": _on_policy,
    "replay": _with_replay,
    "hindsight": _hindsight,
}
"""Each is tuned by as many runs."""


@dataclass(frozen=True)
class StudyArm:
    title: str
    contender: str
    values: Values = field(default_factory=dict)
    """Beside the setting that its contender was tuned to."""
    tasks: Sequence[str] = tuple(TASKS)
    short_first: bool = False


ARMS = {
    "on_policy": StudyArm("on-policy, tuned", "on_policy"),
    "replay": StudyArm("plain replay", "replay"),
    "hindsight": StudyArm("hindsight, of 8 iterations", "hindsight"),
    "hindsight_last": StudyArm("hindsight, of the last iteration", "hindsight", {"replay.hindsight.window": 1}),
    "turn_credit": StudyArm("on-policy, turn credit", "on_policy", {"advantage.credit": "turn"}, _LOOK_UPS),
    "short_first": StudyArm("on-policy, short tasks first", "on_policy", tasks=_LOOK_UPS, short_first=True),
    "on_policy_rerun": StudyArm(
        "on-policy, every call run", "on_policy", {"rollout.replay_observations": False}, _SLOW_TOOLS
    ),
}

Key = tuple[str, str, str, int]
"""Task, arm, setting and seed."""


@dataclass(frozen=True)
class Job:
    """A run to make; `arm` is a contender's name while it is tuned."""

    task: str
    arm: str
    setting: str
    seed: int

    @property
    def key(self) -> Key:
        return self.task, self.arm, self.setting, self.seed

    @property
    def values(self) -> Values:
        if self.seed in TUNING_SEEDS:
            return CONTENDERS[self.arm](SETTINGS[self.setting])
        arm = ARMS[self.arm]
        return {**CONTENDERS[arm.contender](SETTINGS[self.setting]), **arm.values}

    @property
    def is_short_first(self) -> bool:
        return self.seed not in TUNING_SEEDS and ARMS[self.arm].short_first
