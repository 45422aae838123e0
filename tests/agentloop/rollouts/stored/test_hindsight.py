"""A row of hindsight is, token by token, the episode that the same replies would have made of the new task."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentloop.config import RunConfig
from agentloop.environments import EnvironmentFactory, RunEnvironments, Task, load_environment
from agentloop.rollouts.stored.hindsight import Hindsight, Relabelled
from agentloop.rollouts.stored.stored_episodes import StoredEpisodes
from agentloop.rollouts.trajectories import Collected
from context.messages import content_hash
from replay.records import Trajectory
from replay.store import ReplayStore
from tests.agentloop.environments.test_achieved import careless, play
from tests.agentloop.rollouts.collecting import collect
from tests.fakes.records import add_run
from tests.fakes.runs import ROOT
from tests.fakes.scripted import call, scripted_actors

RUN = "run-1"
Scripts = Sequence[Sequence[str]]


def settings(**replay: Any) -> RunConfig:
    hindsight = {"enable": True, **replay}
    return RunConfig.model_validate(
        {
            "rollout": {"max_turns": 14, "max_tokens_per_turn": 200},
            "context": {"max_tokens": 4000},
            "replay": {"fraction": 0.5, "hindsight": hindsight},
        }
    )


def played(factory: EnvironmentFactory, tasks: Sequence[Task], scripts: Scripts) -> Collected:
    return collect(scripted_actors(factory, scripts), [(task, 1) for task in tasks], settings(), run=RUN)


def in_hindsight(
    factory: EnvironmentFactory, rows: Collected, folder: Path, *, held_out: Sequence[Task] = (), **replay: Any
) -> Relabelled:
    folder.mkdir(exist_ok=True)
    with closing(add_run(ReplayStore.create(folder / "replay.sqlite"), RUN)) as store:
        store.append(rows.tasks, rows.groups, rows.trajectories)
        payloads = frozenset(content_hash(task.payload) for task in held_out)
        hindsight = Hindsight(
            scripted_actors(factory, []),
            settings(**replay),
            StoredEpisodes(RunEnvironments.of_one(factory), store),
            payloads,
        )
        found = hindsight.relabel(rows.trajectories, iteration=1, attempt=0)
        store.append(found.tasks, found.groups, found.trajectories)
        return replace(found, trajectories=store.read([row.id for row in found.trajectories]))


def wrong_trail(task: Task) -> list[str]:
    """What is asked first, then `see` to another chain, up to its code."""
    store, key = task.payload["store"], task.payload["key"]
    keys = [key, store[key]["see"]]
    while "next" in store[keys[-1]]:
        keys.append(store[keys[-1]]["next"])
    looked_up = [call("lookup", f'{{"key": "{key}"}}') for key in keys]
    return [*looked_up, f'The code is "{store[keys[-1]]["code"]}".']


def lookups(count: int) -> tuple[EnvironmentFactory, list[Task]]:
    """Tasks whose first `see` leads to a chain of two or more."""
    factory = load_environment("lookup_chain", {"hops": [3, 3]})
    made = (factory.make_task(random.Random(seed)) for seed in range(1000))
    return factory, [task for task in made if len(wrong_trail(task)) > 3][:count]


def new_task(row: Trajectory, found: Relabelled) -> Task:
    (payload,) = (task.payload for task in found.tasks if task.hash == row.record.task)
    opening = [message for message in row.messages if message.author in ("user", "initialization")]
    return Task(tuple(opening), payload)


FETCH_PLACE = f"{ROOT}/examples/fetch_place.py:FetchPlace"


def random_episodes(name: str, count: int) -> tuple[EnvironmentFactory, list[Task], list[list[str]]]:
    """What a careless policy says, with odd calls among it, as it writes it."""
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
    assert len(found.trajectories) > 20
    places = {row.id: place for place, row in enumerate(rows.trajectories)}
    for row in found.trajectories:
        place = places[str(row.record.parent)]
        script = scripts[place][-row.record.num_turns :]
        (episode,) = played(factory, [new_task(row, found)], [script]).trajectories
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
    assert found.metrics() == {"hindsight/claimed": 3.0, "hindsight/rows": 3.0}


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
    assert without.claimed == all_found.claimed == 6
    assert [row.id for row in without.trajectories] == [row.id for row in all_found.trajectories[1:]]


@pytest.mark.parametrize(
    "change",
    [
        {"success": True},
        {"error_kind": "unknown_tool"},
        {"stop_reason": "max_turns"},
        {"environment_version": "0"},
    ],
)
def test_what_succeeded_called_wrongly_or_ended_otherwise_is_not_asked(change: dict[str, Any], tmp_path: Path) -> None:
    factory, (task, *_) = lookups(1)
    rows = played(factory, [task], [wrong_trail(task)])
    (row,) = rows.trajectories
    rows.trajectories = [replace(row, record=replace(row.record, **change))]
    found = in_hindsight(factory, rows, tmp_path)
    assert (found.claimed, found.trajectories) == (0, [])
