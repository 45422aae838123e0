"""What the buffer keeps of an environment that answers back: rewards of replies, tools of tasks, turns of users."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from agentloop.analysis.stored_demonstrations import write_demonstrations
from agentloop.config import RunConfig
from agentloop.environments import RunEnvironments, Task, load_environment
from agentloop.rollouts.stored_episodes import StoredEpisodes
from agentloop.rollouts.trajectories import Collected
from replay import ReplayStore
from replay.exchange import export_file, import_file
from replay.questions.filters import condition
from replay.storage.read import task_records
from tests.agentloop.rollouts.collecting import collect
from tests.agentloop.rollouts.test_dialogues import EXTERN, FILE, LONG
from tests.fakes.records import RUN, add_run
from tests.fakes.scripted import call, scripted_actors

FACTORY = load_environment(f"{FILE}:Dialogue", {})
ENVIRONMENTS = RunEnvironments({FACTORY.name: FACTORY})
STEPS = [
    {"say": "And?", "reward": 0.25, "over": False},
    {"say": "3", "reward": None, "over": False},
    {"say": "Well done.", "reward": 1.0, "over": True},
]
TASK = FACTORY.labelled(Task("Begin.", {"steps": STEPS, "tools": ["look", EXTERN]}))
REPLIES = ["Yes.", call("math.add-1", '{"n": 2}'), "It is 3."]


@pytest.fixture(scope="module")
def rows() -> Collected:
    config = RunConfig.model_validate({**LONG.model_dump(), "batch": {"group_size": 2, "trajectories": 2}})
    return collect(scripted_actors(FACTORY, [REPLIES, ["Yes.", "No.", "It is 3."]]), [(TASK, 2)], config, run=RUN)


@pytest.fixture
def store(tmp_path: Path, rows: Collected) -> Iterator[ReplayStore]:
    with closing(add_run(ReplayStore.create(tmp_path / "replay.sqlite"), RUN)) as store:
        store.append(rows.tasks, rows.groups, rows.trajectories)
        yield store


def test_rows_keep_rewards_of_replies_tools_and_user_turns_there_and_back(
    store: ReplayStore, rows: Collected, tmp_path: Path
) -> None:
    export_file(store, file := tmp_path / "rows.jsonl")
    with closing(ReplayStore.create(tmp_path / "back.sqlite")) as back:
        import_file(back, file)
        for kept in (store, back):
            first, second = kept.read([row.id for row in rows.trajectories])
            assert [message.reward for message in first.messages if message.role == "assistant"] == [0.25, None, 1.0]
            assert first.messages == rows.trajectories[0].messages
            assert (first.record.stop_reason, first.record.reward, first.record.num_user_turns) == ("ended", 1.25, 2)
            assert second.record.num_user_turns == 3
            with kept.reading() as connection:
                (task,) = task_records(connection, [first.record.task]).values()
            assert json.loads(task.tools or "") == list(TASK.tools or ())


def test_rewards_of_observations_are_the_turn_rewards_of_stored_rows(store: ReplayStore, rows: Collected) -> None:
    assert FACTORY.can_reward_replies
    known, row = StoredEpisodes(ENVIRONMENTS, store).turn_rewards, rows.trajectories[0]
    assert known(rows.trajectories) == [(0.25, 0.0, 1.0), (0.25, 0.0, 1.0)]
    unrewarded = replace(row, messages=tuple(replace(said, reward=None) for said in row.messages))
    imported = replace(unrewarded, record=replace(row.record, source="theirs"))
    assert known([unrewarded, imported]) == [(0.0, 0.0, 0.0), None]


def test_demonstrations_have_the_tasks_own_tools_and_end_with_a_reply(store: ReplayStore, tmp_path: Path) -> None:
    write_demonstrations(store, ENVIRONMENTS, file := tmp_path / "wins.jsonl", where=condition("success"))
    line = json.loads(file.read_text().splitlines()[0])
    assert [message["content"] for message in line["messages"]] == ["Begin.", "Yes.", "And?", "", "3", "It is 3."]
    assert line["tools"] == json.loads(json.dumps(TASK.tools))


def test_an_episode_whose_messages_were_evicted_after_the_draw_is_not_found(
    store: ReplayStore, rows: Collected
) -> None:
    store.prune(rows=condition(f"id == '{rows.trajectories[0].id}'"), dry_run=False)
    drawn = [replace(row, messages=()) for row in rows.trajectories]
    assert [episode is None for episode in StoredEpisodes(ENVIRONMENTS, store).find(drawn)] == [True, False]
    store.forget(condition("iteration >= 0"), dry_run=False)
    assert StoredEpisodes(ENVIRONMENTS, store).find(rows.trajectories) == [None, None]
