"""An environment that was started is closed once, however its episode ends; one that can't be closed costs nothing."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.engines import Completion, GenerationFailed
from agentloop.environments import EnvironmentFactory, Task, load_environment
from agentloop.environments.tools.worker_threads import WorkerThreads
from agentloop.errors import UserError
from agentloop.rollouts.demonstrated import demonstrations
from agentloop.rollouts.episodes.run_episodes import play_episode, run_episodes
from context.messages import Message
from tests.agentloop.rollouts.collecting import collect
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.scripted import CUT, call, scripted_actors

LIMITS = {"max_turns": 2, "max_tokens_per_turn": 200, "tool_timeout_s": 0.2, "tool_output_chars": 60}


def counts(factory: EnvironmentFactory) -> Counter[str]:
    return factory.environment.counts  # type: ignore[attr-defined, no-any-return]


def loaded(name: str) -> EnvironmentFactory:
    """Load a class and reset its counts, because the check of the class starts and closes an instance."""
    factory = load_environment(f"{ENVIRONMENTS / 'counted.py'}:{name}", {})
    counts(factory).clear()
    return factory


@pytest.fixture(params=["Holding", "AsyncHolding"])
def factory(request: pytest.FixtureRequest) -> EnvironmentFactory:
    return loaded(request.param)


def play(factory: EnvironmentFactory, tasks: Sequence[Task], *script: Any, **limits: Any) -> list[Any]:
    """Play episodes with one script; episodes of AsyncHolding do not wait for one another."""
    actors = scripted_actors(factory, [script] * len(tasks), concurrent=factory.name.endswith("AsyncHolding"))
    return list(run_episodes(actors, tasks, config(**limits)))


def config(**rollout: Any) -> RunConfig:
    return RunConfig.model_validate({"rollout": {**LIMITS, **rollout}, "context": {"max_tokens": 4000}})


def faulty(fault: str) -> Task:
    return Task("Say something.", {"fault": fault})


@pytest.mark.parametrize(
    ("fault", "script", "stop_reason", "limits"),
    [
        ("", [call("act"), "done"], "answered", {}),
        ("", [call("act"), call("act")], "max_turns", {}),
        ("", ["I was about to" + CUT], "truncated", {}),
        ("hang", [call("act"), "done"], "answered", {}),
        ("hang", [call("act"), "done"], "overtime", {"tool_timeout_s": 30, "episode_timeout_s": 0.2}),
        ("", [GenerationFailed("HTTP 500")], "engine_failure", {}),
    ],
)
def test_environment_is_closed_once_whatever_ends_its_episode(
    fault: str, script: list[Any], stop_reason: str, limits: dict[str, Any], factory: EnvironmentFactory
) -> None:
    (episode,) = play(factory, [faulty(fault)], *script, **limits)
    assert (episode.stop_reason, episode.close_problem) == (stop_reason, None)
    assert counts(factory) == {"started": 1, "closed": 1}


@pytest.mark.parametrize("fault", ["start", "reward"])
def test_environments_are_closed_when_one_of_them_ends_the_run(fault: str, factory: EnvironmentFactory) -> None:
    with pytest.raises(UserError, match=f"{fault} must"):
        play(factory, [faulty(""), faulty(fault), *[faulty("")] * 3], "done")
    assert counts(factory)["closed"] == counts(factory)["started"] >= 1


def test_an_environment_whose_start_is_under_way_when_the_run_ends_is_closed_after_it() -> None:
    factory = loaded("Holding")
    with pytest.raises(UserError, match="start must"):
        play(factory, [*[faulty("late start")] * 4, faulty("start")], "done", tool_timeout_s=5)
    assert counts(factory)["closed"] == counts(factory)["started"] == 5


def test_environment_of_a_cancelled_episode_is_closed(factory: EnvironmentFactory) -> None:
    """A worker cancels an episode after it lost its claim, or when it is asked to leave."""
    actors = scripted_actors(factory, [])

    async def cancelled() -> None:
        async def never(*_: object) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError

        threads = WorkerThreads(2)
        episode = play_episode(actors, faulty(""), config(), ask=never, number=0, threads=threads)
        playing = asyncio.ensure_future(episode)
        while not counts(factory)["started"]:
            await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        threads.close()

    asyncio.run(cancelled())
    assert counts(factory) == {"started": 1, "closed": 1}


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("close", "OSError: would not go at counted.py:"),
        ("unjudged close", "nobody is there"),
        ("slow close", "no end within rollout.tool_timeout_s=0.2 s"),
    ],
)
def test_failing_close_costs_no_episode_is_counted_and_said_once(
    fault: str, problem: str, factory: EnvironmentFactory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        collected = collect(scripted_actors(factory, [["done"]] * 3), [(faulty(fault), 2), (faulty(""), 1)], config())
    assert [row.record.reward for row in collected.trajectories] == [1.0, 1.0, 1.0]
    assert collected.metrics()["rollout/failed_closes"] == 2
    (said,) = [message for message in caplog.messages if ".close must" in message]
    assert f"{factory.name}.close must free what an episode holds, got {problem}" in said


def test_instances_that_are_started_outside_of_an_episode_are_closed(factory: EnvironmentFactory) -> None:
    task = factory.make_task(random.Random(0))
    said = (*task.messages(), Message("assistant", "done", author="llm"))
    assert factory.achieved(task, said) == [] and factory.turn_rewards(task, said, replies=1) is None
    assert counts(factory) == {}  # these methods do not start an instance
    assert factory.reward(task, said) == 1.0
    assert counts(factory) == {"started": 1, "closed": 1}
    next(demonstrations(factory, seed=0))
    assert counts(factory) == {"started": 2, "closed": 2}
    with pytest.raises(UserError, match=r"Unclosable\.close must free what an episode holds, got OSError: would not"):
        loaded("Unclosable")
