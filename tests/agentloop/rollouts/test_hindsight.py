"""A row of hindsight equals, token by token, the episode that the same replies would make of the new task."""

import json
import random
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentloop import Environment, Task
from agentloop.config import RunConfig
from agentloop.environments import EnvironmentFactory, RunEnvironments, call_demonstrated, load_environment
from agentloop.environments.lookup_chain import KEYS
from agentloop.environments.tools.tool_schema import tools_of
from agentloop.rollouts.hindsight import Hindsight
from agentloop.rollouts.stored_episodes import StoredEpisodes
from agentloop.rollouts.trajectories import Collected
from context.messages import Message, ToolCall, content_hash
from replay.store import ReplayStore
from tests.agentloop.rollouts.collecting import collect
from tests.fakes.records import add_run
from tests.fakes.runs import ROOT
from tests.fakes.scripted import call, chain_of, scripted_actors

RUN = "run-1"
Scripts = Sequence[Sequence[str]]


def settings(**replay: Any) -> RunConfig:
    sections = {"rollout": {"max_turns": 14, "max_tokens_per_turn": 200}, "context": {"max_tokens": 4000}}
    return RunConfig.model_validate({**sections, "replay": {"fraction": 0.5, "hindsight": {"enable": True, **replay}}})


def played(factory: EnvironmentFactory, tasks: Sequence[Task], scripts: Scripts) -> Collected:
    return collect(scripted_actors(factory, scripts), [(task, 1) for task in tasks], settings(), run=RUN)


def in_hindsight(
    factory: EnvironmentFactory, rows: Collected, folder: Path, *, held_out: Sequence[Task] = (), **replay: Any
) -> Collected:
    folder.mkdir(exist_ok=True)
    with closing(add_run(ReplayStore.create(folder / "replay.sqlite"), RUN)) as store:
        store.append(rows.tasks, rows.groups, rows.trajectories)
        payloads = frozenset(content_hash(task.payload) for task in held_out)
        episodes = StoredEpisodes(RunEnvironments({factory.name: factory}), store)
        hindsight = Hindsight(scripted_actors(factory, []), settings(**replay), episodes, payloads)
        found = hindsight.relabel(rows.trajectories, iteration=1, attempt=0)
        store.append(found.tasks, found.groups, found.trajectories)
        return replace(found, trajectories=store.read([row.id for row in found.trajectories]))


def wrong_trail(task: Task) -> list[str]:
    """Replies that look up the key in question and then follow `see` into another chain up to its code."""
    store, key = task.payload["store"], task.payload["key"]
    keys = [key, *chain_of(task, store[key]["see"])]
    looked_up = [call("lookup", f'{{"key": "{key}"}}') for key in keys]
    return [*looked_up, f'The code is "{store[keys[-1]]["code"]}".']


def lookups(count: int) -> tuple[EnvironmentFactory, list[Task]]:
    """Tasks whose first `see` leads to a chain of two or more."""
    factory = load_environment("lookup_chain", {"hops": [3, 3]})
    made = (factory.make_task(random.Random(seed)) for seed in range(1000))
    return factory, [task for task in made if len(wrong_trail(task)) > 3][:count]


FETCH_PLACE = f"{ROOT}/examples/fetch_place.py:FetchPlace"


LONGEST = 12
TOOLS = {"lookup": "key", "go": "place", "take": "item", "put": "container"}


def play(environment: Environment, task: Task, say: Callable[[list[Message]], Message]) -> list[Message]:
    environment.start(task)
    messages = list(task.messages())
    for _ in range(LONGEST):
        messages.append(say(messages))
        if not messages[-1].tool_calls:
            break
        for asked in messages[-1].tool_calls:
            content = call_demonstrated(environment, tools_of(type(environment)), asked, max_chars=1000).content
            messages.append(Message("tool", content, author="env", name=asked.name))
    return messages


def careless(environment: Environment, task: Task, rng: random.Random) -> Callable[[list[Message]], Message]:
    """As the demonstrator, but now and then with any call, two calls at once, an old call again, or any answer."""
    names = [name for name in TOOLS if hasattr(environment, name)]

    def any_call() -> ToolCall:
        name = rng.choice(names)
        words: Sequence[Any] = (*rng.sample(KEYS, 3), "", 7, None, ["pearl"])
        return ToolCall(name, {rng.choice([TOOLS[name], "other"]): rng.choice(words)})

    def say(messages: list[Message]) -> Message:
        calls = [call for message in messages for call in message.tool_calls]
        odd, answer = rng.random(), "Done."
        if odd < 0.06:
            return Message("assistant", "", author="llm", tool_calls=(any_call(), any_call())[: 1 + (odd > 0.04)])
        if odd < 0.10 and calls:
            return Message("assistant", "", author="llm", tool_calls=(rng.choice(calls),))
        if odd < 0.12:
            answer = rng.choice(["Done.", "", '"pearl" is in "reed".', 'The code is "50".', "I can't."])
        else:
            with suppress(KeyError, IndexError, StopIteration):  # it goes by records, of which some call got none
                return environment.demonstrate(task, messages, rng)
        return Message("assistant", answer, author="llm")

    return say


def random_episodes(name: str, count: int) -> tuple[EnvironmentFactory, list[Task], list[list[str]]]:
    """Tasks with the texts of a careless policy's replies, some of them with odd calls."""
    factory = load_environment(name, {})
    tasks, scripts = [], []
    for seed in range(count):
        rng, environment = random.Random(seed), factory.create()
        task = factory.make_task(rng)
        said = [row for row in play(environment, task, careless(environment, task, rng)) if row.author == "llm"]
        written = [
            "\n".join([row.content, *(call(c.name, json.dumps(dict(c.arguments))) for c in row.tool_calls)]).strip()
            for row in said
        ]
        if all(written) and not said[-1].tool_calls:
            tasks.append(task)
            scripts.append(written)
    return factory, tasks, scripts


@pytest.mark.parametrize("name", ["lookup_chain", pytest.param(FETCH_PLACE, marks=pytest.mark.slow)])
def test_a_row_is_the_episode_that_its_replies_make_of_its_task(name: str, tmp_path: Path) -> None:
    factory, tasks, scripts = random_episodes(name, 200)
    rows = played(factory, tasks, scripts)
    found = in_hindsight(factory, rows, tmp_path)
    # Whatever the environment claims, its reward confirms.
    assert found.extra_metrics["hindsight/claimed"] == len(found.trajectories) > 20
    places = {row.id: place for place, row in enumerate(rows.trajectories)}
    for row in found.trajectories:
        place = places[str(row.record.parent)]
        script = scripts[place][-row.record.num_turns :]
        (payload,) = (task.payload for task in found.tasks if task.hash == row.record.task)
        opening = tuple(message for message in row.messages if message.author in ("user", "initialization"))
        (episode,) = played(factory, [Task(opening, payload)], [script]).trajectories
        assert episode.record.success and row.record.success
        assert not rows.trajectories[place].record.success
        (ours,), (theirs,) = row.segments, episode.segments
        assert np.array_equal(ours.tokens.token_ids, theirs.tokens.token_ids)
        assert np.array_equal(ours.tokens.authors, theirs.tokens.authors)
        assert np.array_equal(ours.tokens.policy_versions, theirs.tokens.policy_versions)
        assert row.messages == episode.messages
        for fact in ("task", "reward", "num_turns", "num_tool_calls", "num_tokens", "num_action_tokens", "stop_reason"):
            assert getattr(row.record, fact) == getattr(episode.record, fact)
        assert np.isnan(ours.tokens.behavior_log_probs).all() and ours.behavior_context == "relabelled"


def test_rows_are_named_by_their_parents_and_placed_behind_them(tmp_path: Path) -> None:
    factory, tasks = lookups(3)
    rows = played(factory, tasks, [wrong_trail(task) for task in tasks])
    found = in_hindsight(factory, rows, tmp_path, advantage=0.5)
    records = [row.record for row in found.trajectories]
    assert [record.parent for record in records] == [row.id for row in rows.trajectories]
    assert [(record.iteration, record.slot, record.member) for record in records] == [(1, 3, 0), (1, 4, 0), (1, 5, 0)]
    assert {(record.source, record.advantage, record.mean_entropy) for record in records} == {("hindsight", 0.5, None)}
    assert [group.size for group in found.groups] == [1, 1, 1]
    assert [row.num_turns for row in records] == [len(wrong_trail(task)) - 1 for task in tasks]
    assert found.extra_metrics == {"hindsight/claimed": 3.0, "hindsight/rows": 3.0}


def test_short_ends_and_held_out_tasks_are_no_rows(tmp_path: Path) -> None:
    factory, tasks = lookups(6)
    rows = played(factory, tasks, [wrong_trail(task) for task in tasks])
    longest = max(len(wrong_trail(task)) for task in tasks) - 1
    found = in_hindsight(factory, rows, tmp_path / "a", min_turns=longest)
    assert 0 < len(found.trajectories) < 6
    assert {row.record.num_turns for row in found.trajectories} == {longest}
    all_found = in_hindsight(factory, rows, tmp_path / "b")
    held_out = [Task("asked in other words", all_found.tasks[0].payload)]
    without = in_hindsight(factory, rows, tmp_path / "c", held_out=held_out)
    assert without.extra_metrics["hindsight/claimed"] == all_found.extra_metrics["hindsight/claimed"] == 6
    assert [row.id for row in without.trajectories] == [row.id for row in all_found.trajectories[1:]]


def test_rows_that_succeeded_or_erred_or_ended_otherwise_are_not_relabelled(tmp_path: Path) -> None:
    factory, tasks = lookups(5)
    rows = played(factory, tasks, [wrong_trail(task) for task in tasks])
    changes: list[dict[str, Any]] = [
        *({"success": True}, {"error_kinds": "unknown_tool"}, {"stop_reason": "max_turns"}),
        *({"environment_version": "0"}, {}),
    ]
    rows.trajectories = [
        replace(row, record=replace(row.record, **change))
        for row, change in zip(rows.trajectories, changes, strict=True)
    ]
    found = in_hindsight(factory, rows, tmp_path)
    assert [row.record.parent for row in found.trajectories] == [rows.trajectories[-1].id]
    assert found.extra_metrics["hindsight/claimed"] == 1
