"""How agents end that ask without a client, and what a run makes of it."""

from __future__ import annotations

import pytest

from agentloop.errors import TrainingStopped
from tests.fakes.agents import asking
from tests.fakes.agents.played import play


@pytest.mark.parametrize(("agent", "tasks"), [("solve", 1), ("one_of_two", 2)], ids=["at once", "gathered"])
def test_an_engine_that_can_not_go_on_ends_the_run_and_not_an_episode(agent: str, tasks: int) -> None:
    def says(prompt: str) -> str:
        raise TrainingStopped("log-probs must be numbers, got NaN")

    with pytest.raises(TrainingStopped, match="got NaN"):
        play(f"{asking.__file__}:{agent}", says, tasks=tasks, episode_timeout_s=10.0)
