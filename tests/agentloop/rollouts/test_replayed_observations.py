"""Calls of deterministic tools are answered from memory, and no record changes by this."""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.environments import EnvironmentFactory, RunEnvironments, Task, load_environment
from agentloop.rollouts.actors import Actors, tool_memory
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.episodes.run_episodes import run_episodes
from agentloop.rollouts.trajectories import repeated_calls
from context.messages import Message, ToolCall
from replay.records import Trajectory
from tests.agentloop.rollouts.test_hindsight import FETCH_PLACE, random_episodes
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.records import trajectory
from tests.fakes.scripted import call, scripted_actors, shown

FILE = ENVIRONMENTS / "counted.py"
Scripts = Sequence[Sequence[str]]


def settings(**rollout: Any) -> RunConfig:
    limits = {"max_turns": 14, "max_tokens_per_turn": 200, "parallel": 1000, **rollout}
    return RunConfig.model_validate({"rollout": limits, "context": {"max_tokens": 4000}})


def actors_for(factory: EnvironmentFactory, scripts: Scripts, config: RunConfig, *, concurrent: bool = False) -> Actors:
    memory = tool_memory(config, RunEnvironments({factory.name: factory}))
    return scripted_actors(factory, scripts, concurrent=concurrent, memory=memory)


def play(environment: str, scripts: Scripts, *, concurrent: bool = False) -> tuple[list[Episode], list[str]]:
    """Episodes of one task, and the calls that were run."""
    factory = load_environment(f"{FILE}:{environment}", {})
    runs = sys.modules[factory.environment.__module__].RUNS
    runs.clear()
    config, task = settings(), factory.make_task(random.Random(0))
    actors = actors_for(factory, scripts, config, concurrent=concurrent)
    return list(run_episodes(actors, [task] * len(scripts), config)), list(runs)


def square(n: int) -> str:
    return call("square", f'{{"n": {n}}}')


def add(n: int) -> str:
    return call("add", f'{{"n": {n}}}')


@pytest.mark.parametrize("concurrent", [False, True])
def test_only_one_of_equal_simultaneous_calls_is_run(concurrent: bool) -> None:
    episodes, runs = play("Pure", [[square(3), square(4), "done"]] * 8, concurrent=concurrent)
    assert sorted(runs) == ["square 3", "square 4"]
    assert [shown(episode) for episode in episodes] == [["9", "16"]] * 8
    assert sum(episode.num_tool_runs for episode in episodes) == 2
    assert sum(episode.num_replayed_calls for episode in episodes) == 14
    assert {episode.num_tool_calls for episode in episodes} == {2}


def test_calls_answered_from_memory_are_run_before_a_new_call_that_depends_on_them() -> None:
    """One episode has add 1 from memory; its next call is new and needs the total after add 1."""
    episodes, runs = play("Sums", [[add(1), add(2), add(5), "done"], [add(1), add(3), "done"]])
    assert [shown(episode) for episode in episodes] == [["1", "3", "8"], ["1", "4"]]
    assert runs.count("add 1") == 2
    # One of the five calls is answered from memory and run later.
    assert sum(episode.num_tool_runs for episode in episodes) == 5
    assert sum(episode.num_replayed_calls for episode in episodes) == 1


def test_the_same_call_is_known_by_its_arguments_or_after_the_same_calls() -> None:
    _, runs = play("Pure", [[call("draw"), square(2), call("draw"), "done"]] * 2)
    assert sorted(runs) == ["draw"] * 4 + ["square 2"]  # what is not declared is run
    episodes, _ = play("Sums", [[add(1), add(1), "done"], [add(2), add(1), "done"]])
    assert [shown(episode) for episode in episodes] == [["1", "2"], ["2", "3"]]
    episodes, runs = play("Sums", [[add(1), add(2), "done"], [square(7), add(1), square(7), add(2), "done"]])
    assert [shown(episode) for episode in episodes] == [["1", "3"], ["49", "1", "49", "3"]]
    assert sorted(runs) == ["add 1", "add 2", "square 7"]


def test_after_a_call_that_failed_everything_is_run() -> None:
    """A failed call may have changed the state. Wrong arguments reach no tool and change nothing."""
    script = [add(1), call("fail"), add(1), "done"]
    episodes, runs = play("Sums", [script, script])
    assert [shown(episode)[2] for episode in episodes] == ["102", "102"]
    assert runs.count("fail") == 2
    wrong = [add(1), call("add", '{"n": "x"}'), add(2), "done"]
    episodes, runs = play("Sums", [wrong, wrong])
    assert [shown(episode)[2] for episode in episodes] == ["3", "3"]
    assert runs.count("add 2") == 1


def facts(episode: Episode) -> tuple[Any, ...]:
    tokens = [segment.tokens for segment in episode.segments]
    arrays = [(t.token_ids.tobytes(), t.authors.tobytes(), t.behavior_log_probs.tobytes()) for t in tokens]
    return episode.messages, arrays, episode.environment_reward, episode.stop_reason, episode.num_tool_calls


@pytest.mark.parametrize(
    ("name", "concurrent"), [("lookup_chain", False), pytest.param(FETCH_PLACE, True, marks=pytest.mark.slow)]
)
def test_rows_are_bit_identical_with_and_without(name: str, concurrent: bool) -> None:
    """Each task has eight episodes: three are equal to the end, the others up to some point."""
    factory, tasks, scripts = random_episodes(name, 60)
    rng = random.Random(1)
    each: list[tuple[Task, list[str]]] = []
    for task, script in zip(tasks, scripts, strict=True):
        cuts = [len(script)] * 3 + [rng.randint(1, len(script)) for _ in range(5)]
        each += [(task, [*script[: cut - 1], script[-1] if cut == len(script) else "I stop."]) for cut in cuts]

    def rows(*, remembers: bool) -> tuple[list[Any], int]:
        config = settings(replay_observations=remembers)
        actors = actors_for(factory, [script for _, script in each], config, concurrent=concurrent)
        ended = list(run_episodes(actors, [task for task, _ in each], config))
        return [facts(episode) for episode in ended], sum(episode.num_tool_runs for episode in ended)

    (with_memory, runs), (without, all_runs) = rows(remembers=True), rows(remembers=False)
    assert with_memory == without
    assert runs < 0.4 * all_runs


def test_answers_are_for_their_task_and_their_environment_alone() -> None:
    config = settings()
    factory = load_environment(f"{FILE}:Pure", {})
    tasks = [factory.make_task(random.Random(seed)) for seed in range(3)]
    actors = actors_for(factory, [[square(3), "done"]] * 3, config)
    episodes = list(run_episodes(actors, tasks, config))
    assert [episode.num_tool_runs for episode in episodes] == [1, 1, 1]
    assert actors.memory is not None
    answered = actors.memory.take_new()
    assert len({record.id for record in answered}) == len({record.task for record in answered}) == 3
    found = {(record.tool, json.dumps(dict(record.arguments)), record.content) for record in answered}
    assert found == {("square", '{"n": 3}', "9")}
    hashes = {load_environment("lookup_chain", options).tools_hash(100) for options in ({}, {"padding": 2})}
    assert len(hashes) == 2
    assert factory.tools_hash(100) != factory.tools_hash(101)


def calls(task: str, *turns: Sequence[int]) -> Trajectory:
    """Make a trajectory with these calls, reply by reply."""
    messages = [Message("user", "go")]
    for turn in turns:
        made = tuple(ToolCall("look", {"n": n}) for n in turn)
        messages.append(Message("assistant", "", author="llm", tool_calls=made))
        messages += [Message("tool", "x", author="env", name="look") for _ in turn]
    row = trajectory("id")
    return replace(row, record=replace(row.record, task=task), messages=tuple(messages))


def test_a_call_is_repeated_after_the_same_calls_of_the_same_task() -> None:
    # Of six calls 1, 1-2, 1-3 and, of the other task, 1 are new.
    assert repeated_calls([calls("a", [1], [2]), calls("a", [1], [3]), calls("b", [1]), calls("a", [1])]) == 1 - 4 / 6
    # Calls of one reply follow each other.
    assert repeated_calls([calls("a", [1, 2]), calls("a", [1], [2])]) == 0.5
    assert repeated_calls([calls("a", [1, 2]), calls("a", [2, 1])]) == 0.0
    assert repeated_calls([]) is None
    assert repeated_calls([calls("a")]) is None
