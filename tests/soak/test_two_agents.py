"""Both agents of examples/ learn what their pages say, from nothing, on data of a seed that no page has."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.two_agents import AGENTS, learn

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("agent", AGENTS)
def test_held_out_success_rises_by_thirty_points(agent: str, tmp_path: Path) -> None:
    found = learn(agent, 7, tmp_path)
    print(found)
    assert found["after"] - found["before"] >= 0.3
