"""Episodes that run at the same time: slow tools, tools that never return, and what is recorded all the same."""

import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.environments import load_environment
from agentloop.rollouts.episodes.run_episodes import Progress, run_episodes
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.scripted import call, scripted_actors, shown

NEVER = [call("never"), "done"]


def play(
    scripts: Sequence[Sequence[str]],
    *,
    environment: str = "Slow",
    concurrent: bool = False,
    progress: Progress = lambda *_: None,
    **rollout: Any,
):
    factory = load_environment(f"{ENVIRONMENTS / 'slow_tools.py'}:{environment}", {})
    limits = {"max_turns": 4, "max_tokens_per_turn": 200, "tool_timeout_s": 5.0, **rollout}
    config = RunConfig.model_validate({"rollout": limits, "context": {"max_tokens": 4000}})
    actors = scripted_actors(factory, scripts, concurrent=concurrent)
    rng = random.Random(0)
    return list(run_episodes(actors, [factory.make_task(rng) for _ in scripts], config, progress=progress))


@pytest.mark.parametrize("concurrent", [False, True])
def test_eight_tools_run_at_the_same_time(concurrent: bool) -> None:
    episodes = play([[call("meet"), "done"]] * 8, concurrent=concurrent)
    assert [shown(episode) for episode in episodes] == [["met"]] * 8


def test_progress_has_the_tokens_that_engines_elsewhere_replied() -> None:
    sampled: list[int] = []
    (episode,) = play([["done"]], concurrent=True, progress=lambda ended, of, tokens: sampled.append(tokens()))
    assert sampled == [0, (episode.segments[0].tokens.policy_versions >= 0).sum()]


def test_rows_are_the_same_at_any_number_of_threads() -> None:
    rng = random.Random(3)
    pause = call("pause", '{"seconds": 0.01}')
    scripts = [[call("wait", f'{{"seconds": {rng.random() / 50:.4f}}}'), pause, "done"] for _ in range(12)]

    def rows(threads: int) -> list[Any]:
        episodes = play(scripts, tool_threads=threads)
        return [(e.messages, e.segments[0].tokens.token_ids.tobytes(), e.environment_reward) for e in episodes]

    assert rows(1) == rows(5) == rows(64)


def test_a_concurrent_episode_goes_on_while_another_waits() -> None:
    # If the episodes took turns together, the second could not end before the first one's tool has returned.
    waiting, quick = [call("wait_for_an_end"), "done"], [call("wait", '{"seconds": 0.1}'), "done"]
    assert shown(play([waiting, quick], concurrent=True)[0]) == ["True"]


@pytest.mark.slow
def test_tools_that_never_return_do_not_hold_up_the_end_of_the_process() -> None:
    program = "from tests.agentloop.rollouts.test_side_by_side import *; play([NEVER] * 64, tool_timeout_s=0.2)"
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_an_environment_with_one_thread_is_called_in_no_other() -> None:
    notes = [call("note", '{"n": 1}'), call("note", '{"n": 2}'), "done"]
    episodes = play([notes] * 4, environment="OneConnection")
    assert [(shown(episode), episode.environment_reward) for episode in episodes] == [(["noted"] * 2, 2.0)] * 4
    late = [notes[0], call("wait", '{"seconds": 0.4}'), "done"]
    (episode,) = play([late], environment="OneConnection", tool_timeout_s=0.1)
    assert (episode.error_kinds, episode.environment_reward) == (("timeout",), 1.0)
