"""What limits a run, by its metrics."""

from __future__ import annotations

import pytest

from replay.pages.report import tiles
from replay.questions.runs import regime


def of(*, success: float, fresh: float = 64, **metrics: float) -> dict[str, tuple[tuple[int, float], ...]]:
    """Two iterations of equal values, but for success: half of what is given, then half as much again."""
    named = {"batch/fresh": fresh, **{name.replace("__", "/"): value for name, value in metrics.items()}}
    both = {name: ((1, value), (2, value)) for name, value in named.items()}
    return {"rollout/success": ((1, 0.5 * success), (2, 1.5 * success)), **both}


@pytest.mark.parametrize(
    ("metrics", "limit"),
    [
        # 0.005 x 64 = 0.32 successes per batch, below 1/3; 0.006 x 64 = 0.384
        (of(success=0.005), "successes"),
        (of(success=0.006), "optimizer steps"),
        (of(success=0.5, time__in_tools=0.31), "tools"),
        (of(success=0.5, time__in_tools=0.29), "optimizer steps"),
        (of(success=0.5, time__in_tools=0.9, tools__repeated=0.6), "repeated tool calls"),
        (of(success=0.5, time__in_tools=0.9, tools__repeated=0.2), "tools"),
        # They are answered from memory already.
        (of(success=0.5, time__in_tools=0.9, tools__repeated=0.6, tools__replayed=0.6), "tools"),
        # Nothing to learn from comes first.
        (of(success=0.0, time__in_tools=0.9), "successes"),
        # Only the newest eight iterations count.
        (
            {
                "rollout/success": tuple((i, 0.5 * (i >= 20)) for i in range(28)),
                "batch/fresh": tuple((i, 64.0) for i in range(28)),
            },
            "optimizer steps",
        ),
    ],
)
def test_the_limit_follows_from_the_metrics(metrics: dict[str, tuple[tuple[int, float], ...]], limit: str) -> None:
    found = regime(metrics, {})
    assert found is not None and found.limit == limit
    assert [tile.name for tile in tiles(metrics, {})][-1] == "limited by"
    assert regime({}, {}) is None


def test_facts_and_advice_are_said() -> None:
    numbers = {"rollout__groups_without_signal": 0.5, "tools__repeated": 0.7, "tools__replayed": 0.6}
    found = regime(of(success=0.25, time__in_tools=0.4, **numbers), {})
    assert found is not None
    assert found.text == (
        "16 successes expected per batch of fresh episodes; 50 % of the groups without a signal; 70 % of the tool "
        "calls repeated, 60 % answered from memory; 40 % of an episode's time in tools, 60 % in replies. Try "
        "collection.max_staleness 1 or more, so that the policy learns while tools work: docs/evidence.md."
    )
    found = regime(of(success=0.0), {"replay": {"hindsight": {"enable": True}}})
    assert found is not None and "Hindsight is on" in found.text  # and not: switch it on
