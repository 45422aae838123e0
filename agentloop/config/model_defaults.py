"""Defaults that hold where `model.path` names a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODEL_DEFAULTS: Mapping[tuple[str, ...], Any] = {
    ("run", "iterations"): 200,
    ("context", "max_tokens"): 4096,
    ("rollout", "max_turns"): 12,
    ("rollout", "max_tokens_per_turn"): 512,
    ("rollout", "parallel"): 64,
    ("batch", "trajectories"): 64,
    ("batch", "mini_batch"): 32,
    ("batch", "micro_batch_tokens"): 8192,
    ("critic", "optimizer", "learning_rate"): 1e-5,
    ("optimizer", "learning_rate"): 1e-6,
    ("optimizer", "warmup_iterations"): 5,
    ("optimizer", "schedule"): "linear",
    ("sft", "learning_rate"): 1e-5,
    ("evaluation", "every"): 10,
    ("evaluation", "tasks"): 64,
    ("checkpoint", "every"): 10,
}


def defaults_of(values: Mapping[str, Any], *, has_model: bool, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """`values`, the sections' own defaults from `above` down, with those of a named model laid over."""
    laid = {}
    for name, value in values.items():
        path = (*above, name)
        if isinstance(value, Mapping):
            laid[name] = defaults_of(value, has_model=has_model, above=path)
        else:
            laid[name] = MODEL_DEFAULTS.get(path, value) if has_model else value
    return laid
