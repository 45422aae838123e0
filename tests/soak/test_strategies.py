"""Every context strategy acts and learns where it matters, through the front door."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agentloop.training.strategy_runs import assert_acts_and_learns, strategies

CASES = {
    "linear": ("{}", None),
    "linear_think": ("{}", "strip_thinking"),
    "sliding_window": ("{budget: 270}", "drop_turns"),
    "clip_tool_results": ("{budget: 375, keep_chars: 0}", "clip_tool_results"),
    "memory": ("{budget: 360, max_summary_tokens: 40}", "summarise"),
}
"""Options, and what the strategy's rewrites are counted as."""


@pytest.mark.soak
@pytest.mark.parametrize("strategy", CASES)
def test_strategy_acts_in_half_of_the_episodes_and_learns(strategy: str, tmp_path: Path) -> None:
    options, kind = CASES[strategy]
    run = strategies(tmp_path, f"context.strategy={strategy}", f"context.options={options}", "run.iterations=16")
    assert_acts_and_learns(run, kind)
