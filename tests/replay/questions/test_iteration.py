"""What one update learned from and did, and how one task was tried: one answer each, from few queries."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from replay import ReplayError, ReplayStore, questions
from replay.records import EVICTED, FRESH, ORPHANED, REPLAY, DrawRecord
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from tests.fakes.records import RUN, FreshRows, iterate, iteration_record, new_store, set_state, sql, task
from tests.fakes.replay_command import ask


def trained(location: Location, *, drawn: int = 3) -> ReplayStore:
    store = new_store(location)
    sampler = make_sampler("uniform", 3)
    for iteration in (1, 2, 3):
        iterate(store, iteration, sampler, count=drawn)
    return store


def test_iteration_has_its_neighbours_the_policy_it_made_and_its_metrics(location: Location) -> None:
    store = trained(location)
    first, second, third = (questions.iteration(store, RUN, number) for number in (1, 2, 3))
    assert [(a["previous"], a["next"], a["last"]) for a in (first, second, third)] == [
        (None, 2, 3),
        (1, 3, 3),
        (2, None, 3),
    ]
    assert second["policy"] == {"version": 2, "checkpoint": None}
    assert second["metrics"] == {"actor/grad_norm": 1.0}
    assert second["fraction"] == 0.2
    with pytest.raises(ReplayError, match="from 1 to 3, got 4"):
        questions.iteration(store, RUN, 4)


def test_iteration_has_the_groups_of_its_rows_and_marks_those_that_teach_nothing(location: Location) -> None:
    store = trained(location)
    answer = questions.iteration(store, RUN, 3)
    by_slot = {row["slot"]: row for row in answer["trajectories"]}
    assert sorted(slot for group in answer["groups"] for slot in group["slots"]) == sorted(by_slot)
    for group in answer["groups"]:
        assert {by_slot[slot]["group"] for slot in group["slots"]} == {group["id"]}
        assert {by_slot[slot]["stream"] for slot in group["slots"]} == {group["stream"]}
    assert [(len(g["slots"]), g["stream"], g["degenerate"]) for g in answer["groups"]][:2] == [(4, FRESH, False)] * 2
    born = dict(sql(store, "select id, advantage from trajectories"))
    assert all(row["stored_advantage"] == born[row["trajectory"]] for row in answer["trajectories"])
    sql(store, "update groups set reward_std = 0.0 where id = ?", answer["groups"][0]["id"])
    again = questions.iteration(store, RUN, 3)["groups"]
    assert [(group["degenerate"], group["teaches"]) for group in again][:2] == [(True, True), (False, True)]
    sql(store, "update draws set advantage = 0.0 where iteration = 3 and slot < 4")
    assert [group["teaches"] for group in questions.iteration(store, RUN, 3)["groups"]][:2] == [False, True]


def test_an_iteration_outlives_the_content_of_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    with closing(trained(path)) as store:
        before = questions.iteration(store, RUN, 2)
    assert ask("forget", str(path), "--where", "iteration < 3", "--yes").exit_code == 0
    with closing(ReplayStore.open(path, read_only=True)) as store:
        after = questions.iteration(store, RUN, 2)
    assert {row["state"] for row in after["trajectories"]} == {EVICTED}
    for row in (*before["trajectories"], *after["trajectories"]):
        del row["state"], row["state_reason"]
    assert after == before


def tried(location: Location) -> ReplayStore:
    """The same task in three iterations, 1, 2 and 4 of 4 successful; of the last only one row is left to draw."""
    store = new_store(location)
    for iteration, rate in ((1, 0.25), (2, 0.5), (3, 1.0)):
        FreshRows(iteration, rates=(rate,)).append_to(store)
    sql(store, 'update "groups" set reward_mean = success_rate')
    for (id,) in sql(store, "select id from trajectories where iteration = 3 and member > 0"):
        set_state(store, id, EVICTED)
    return store


def test_task_has_its_attempts_by_group_by_policy_and_by_difficulty(location: Location) -> None:
    store = tried(location)
    answer = questions.task(store, "task")
    assert (answer["hash"], answer["environment"], answer["payload"]["hops"]) == ("task-1", "lookup_chain", 2)
    assert (answer["attempts"], answer["successes"], answer["reward_mean"]) == (12, 7, pytest.approx(7 / 12))
    assert (answer["eligible"], answer["first_iteration"], answer["last_iteration"], answer["runs"]) == (9, 1, 3, 1)
    found = [(v["version"], v["attempts"], v["successes"]) for v in answer["versions"]]
    assert found == [(0, 4, 1), (1, 4, 2), (2, 4, 4)]
    assert [(g["iteration"], g["successes"], g["size"], g["eligible"]) for g in answer["groups"]] == [
        (3, 4, 4, 1),
        (2, 2, 4, 4),
        (1, 1, 4, 4),
    ]
    assert [(b["successes"], b["groups"], b["eligible"], b["newest"]) for b in answer["difficulty"]] == [
        (1, 1, 4, False),
        (2, 1, 4, False),
        (4, 1, 1, True),
    ]
    assert answer["prompt"] and answer["prompt"][-1]["role"] != "assistant"
    json.dumps(answer, allow_nan=False)


def test_task_counts_what_updates_drew_of_it_and_not_what_a_resume_undid(location: Location) -> None:
    store = tried(location)
    ((id,),) = sql(store, "select id from trajectories where iteration = 1 and member = 0")
    rows = [DrawRecord(RUN, 2, slot, str(id), REPLAY, probability=None, staleness=1) for slot in (0, 1)]
    store.reserve_fresh(rows)
    store.commit(iteration_record(2, replay=2), rows, sampler_state={})
    answer = questions.task(store, "task-1", RUN)
    assert answer["replayed"] == 2
    assert [group["replayed"] for group in answer["groups"]] == [0, 0, 2]
    assert {row["id"]: row["uses"] for row in answer["trajectories"]}[id] == 2
    for (other,) in sql(store, "select id from trajectories where iteration = 3"):
        set_state(store, other, ORPHANED)
    after = questions.task(store, "task-1", RUN)
    assert (after["attempts"], after["orphaned"], after["last_iteration"]) == (8, 4, 2)
    assert len(after["trajectories"]) == 12
    assert questions.task(store, "task-1", "other")["attempts"] == 0


def test_tasks_of_no_or_several_hashes_are_refused(location: Location) -> None:
    store = tried(location)
    store.append([task("task-2")], [], [])
    for prefix, which in (("nope", "none"), ("", "none"), ("task-", "more than one: task-1, task-2")):
        with pytest.raises(ReplayError, match=f"HASH must be the beginning of one task's hash in .* begins {which}"):
            questions.task(store, prefix)
