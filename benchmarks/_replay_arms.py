"""What is compared: tasks, and the ways to train on them, each as what it changes in configs/quickstart.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Settings = Mapping[str, object]
"""Values by dotted key of the configuration."""

BUDGET = 5120
"""Fresh episodes after which a run that has not reached the target is over, whatever the arm."""
WAIT_S = 0.05
"""Of the slow tool, per call."""
TARGET = 0.9
"""Held-out success to reach in two evaluations in a row."""
SEEDS = (0, 1, 2, 3, 4)

COMMON: Settings = {
    "run.stop_at_success": None,
    "replay.fraction": 0.0,
    "replay.schedule.shape": "constant",
    "replay.schedule.final": None,
    "evaluation.every": 0,
    "checkpoint.keep_policies": "none",
}


@dataclass(frozen=True)
class BenchTask:
    title: str
    settings: Settings = field(default_factory=dict)
    start: str = ""
    """The task whose warmed-up models it begins with; empty: its own."""


@dataclass(frozen=True)
class Arm:
    title: str
    settings: Settings = field(default_factory=dict)


TASKS = {
    "dense": BenchTask("dense: the quickstart's, 2 to 5 hops"),
    "sparse": BenchTask(
        "sparse: 3 to 6 hops, after more careless demonstrations",
        {
            "environment.options.hops": [3, 6],
            "warm_up.options": {"hops": [2, 5], "p_next": 0.4, "p_stop": 0.4},
        },
    ),
    "slow": BenchTask("slow: 2 to 5 hops, 50 ms per tool call", {"environment.options.delay_s": WAIT_S}, start="dense"),
}


def _replay(fraction: float, sampler: str, **more: object) -> Settings:
    return {"replay.fraction": fraction, "replay.sampler": sampler} | {
        key.replace("__", "."): value for key, value in more.items()
    }


HALF: Settings = {"batch.trajectories": 64, "batch.mini_batch": 32}
ESS: Settings = {"replay.controller": "ess"}

ARMS = {
    "on_policy": Arm("on-policy, 128"),
    "half_batch": Arm("on-policy, 64", HALF),
    "half_epochs": Arm("on-policy, 64, 2 epochs", {"batch.trajectories": 64, "batch.ppo_epochs": 2}),
    "replay_50_success": Arm("replay 0.5, success", _replay(0.5, "success")),
    "replay_on_top": Arm(
        "replay on top: 64 + 32",
        _replay(1 / 3, "success", replay__shortfall="shrink", batch__trajectories=96, batch__mini_batch=48),
    ),
    "replay_50_uniform": Arm("replay 0.5, uniform", _replay(0.5, "uniform")),
    "replay_25_success": Arm("replay 0.25, success", _replay(0.25, "success")),
    "replay_25_uniform": Arm("replay 0.25, uniform", _replay(0.25, "uniform")),
    "extra_epoch": Arm("on-policy, 128, 2 epochs", {"batch.ppo_epochs": 2}),
    "replay_50_success_ess": Arm("replay 0.5, success, ESS", _replay(0.5, "success") | ESS),
    "replay_50_advantage": Arm("replay 0.5, advantage", _replay(0.5, "advantage")),
    "replay_50_recency": Arm("replay 0.5, recency", _replay(0.5, "recency", replay__sampler_options={"half_life": 4})),
    "replay_50_difficulty": Arm("replay 0.5, difficulty", _replay(0.5, "difficulty")),
    "replay_50_entropy": Arm("replay 0.5, entropy", _replay(0.5, "entropy")),
    "replay_75_success": Arm("replay 0.75, success", _replay(0.75, "success")),
    "replay_50_epochs": Arm("replay 0.5, success, 2 epochs", _replay(0.5, "success", batch__ppo_epochs=2)),
    "half_4_epochs": Arm("on-policy, 64, 4 epochs", {"batch.trajectories": 64, "batch.ppo_epochs": 4}),
}
"""In the order they run in, for one seed after another."""
