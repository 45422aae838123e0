"""GRPO takes a policy from nothing to its task under a context strategy that acts, in a minute of one core."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agentloop.training.strategy_runs import assert_acts_and_learns, strategies

SMALL = (
    "run.iterations=9",
    "run.stop_at_success=null",
    "tiny.hidden=96",
    "environment.options={hops: [2, 3], keys: 8, p_next: 0.55, p_stop: 0.55, thinking: true}",
    "warm_up={batch: 4, loss_target: 0.2, updates_after_target: 40, options: {hops: [1, 2]}}",
    "batch={trajectories: 96, mini_batch: 32}",
    "optimizer={learning_rate: 7.0e-4, warmup_iterations: 2, schedule: constant}",
    "evaluation={every: 0, tasks: 128}",
)
"""Fewer keys to copy, shorter chains, no padding: what takes long here is learning to copy."""


@pytest.mark.soak
def test_policy_learns_with_a_sliding_window_over_its_newest_turn(tmp_path: Path) -> None:
    run = strategies(tmp_path, *SMALL, "context.strategy=sliding_window", "context.options.budget=190")
    assert_acts_and_learns(run, "drop_turns", rises=0.60)
