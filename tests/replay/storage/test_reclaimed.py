"""What is left of rows that were evicted for good, and what no longer grows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from replay import ReplayStore, questions
from replay.errors import ContentGone
from replay.exchange import export_file
from replay.questions.iteration import lineage_up_to
from replay.questions.trajectory import lineage_of
from replay.records import TaskRecord
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from replay.storage.retention import Capacity
from tests.fakes.records import RUN, FreshRows, group, iterate, new_store, request, sql, task, trajectory
from tests.fakes.replay_command import ask

TABLES = ("trajectories", "segments", "messages", "token_scores")


def trained(location: Location, iterations: int = 3) -> ReplayStore:
    """Iterations of 8 fresh rows and 4 drawn ones."""
    store = new_store(location)
    sampler = make_sampler("uniform", 3)
    for iteration in range(1, iterations + 1):
        iterate(store, iteration, sampler, count=4)
    return store


def reclaim(store: ReplayStore, iteration: int, **limits: int) -> int:
    store.evict(RUN, iteration, policy_version=iteration, capacity=Capacity(**limits))
    return store.purge(RUN, iteration)


def counts(store: ReplayStore, *tables: str) -> list[int]:
    return [sql(store, f"select count(*) from {table}")[0][0] for table in tables]


def test_purge_leaves_a_few_numbers_of_a_row_and_nothing_else(location: Location) -> None:
    store = trained(location)
    facts = "id, group_id, slot, member, attempt, source, reward, success, advantage, policy_version_min"
    before = sql(store, f"select {facts} from trajectories where iteration = 1 order by slot")
    draws = sql(store, "select run, iteration, slot, trajectory, drift_mean from draws order by 1, 2, 3")
    groups = sql(store, "select * from groups order by id")
    assert reclaim(store, 3, age=1) == 8
    assert counts(store, *TABLES, "reclaimed") == [16, 16, 16, 0, 8]
    assert sql(store, f"select {facts} from reclaimed order by slot") == before
    assert sql(store, "select distinct state_reason from reclaimed") == [("capacity.age at iteration 3, was eligible",)]
    assert sql(store, "select run, iteration, slot, trajectory, drift_mean from draws order by 1, 2, 3") == draws
    assert sql(store, "select * from groups order by id") == groups


def test_payload_of_a_task_goes_with_its_last_row_and_comes_back_with_it(store: ReplayStore) -> None:
    made = TaskRecord("made-1", "lookup_chain", {"text": "long " * 100})
    rows = [trajectory("a", slot=0), trajectory("b", group="g2", task="made-1", slot=1)]
    store.append([task(), made], [group(), group("g2", task="made-1")], rows)
    store.append([task()], [group("g3", iteration=2)], [trajectory("c", group="g3", iteration=2)])
    reclaim(store, 2, rows=1)
    payloads = "select payload from tasks order by hash"
    removed = ('{"removed":true}',)
    assert (counts(store, "reclaimed"), sql(store, payloads)[0]) == ([2], removed)
    assert sql(store, payloads)[1] != removed
    again = trajectory("d", group="g4", task="made-1", iteration=3)
    store.append([made], [group("g4", task="made-1", iteration=3)], [again])
    assert removed not in sql(store, payloads)


def test_lineage_tells_of_a_reclaimed_row_what_it_told_before(location: Location) -> None:
    store = trained(location)
    ((id,),) = sql(
        store,
        "select trajectory from draws where stream = 'replay' and iteration = 2 and trajectory in "
        "(select id from trajectories where iteration = 1) order by 1 limit 1",
    )
    before = lineage_of(store, str(id)), questions.iteration(store, RUN, 2), lineage_up_to(store, RUN, 3)
    reclaim(store, 3, age=1)
    after = lineage_of(store, str(id)[:9]), questions.iteration(store, RUN, 2), lineage_up_to(store, RUN, 3)
    why = {"state": "evicted", "state_reason": "capacity.age at iteration 3, was eligible"}
    assert after[0] == {**before[0], **why}
    for earlier, later in zip(before[1:], after[1:], strict=True):
        expected = [{**row, **(why if row["collected_iteration"] == 1 else {})} for row in earlier["trajectories"]]
        assert later == {**earlier, "trajectories": expected}


def test_questions_about_a_reclaimed_row_are_answered(location: Location) -> None:
    store = trained(location)
    ((id,),) = sql(store, "select id from trajectories where iteration = 1 and slot = 5")
    reclaim(store, 3, age=1)
    reason = "capacity.age at iteration 3, was eligible"
    found = questions.overview(store, str(id))
    assert (found["problem"], found["record"]) == ({"kind": "reclaimed", "reason": reason}, None)
    assert [found["reclaimed"][name] for name in ("run", "iteration", "slot", "member")] == [RUN, 1, 5, 1]
    shown = questions.trajectory(store, str(id))
    assert (shown["state"], shown["state_reason"], shown["task"]["hash"]) == ("evicted", reason, "task-1")
    assert shown["uses"] == found["uses"] != []
    with pytest.raises(ContentGone, match=r"got an evicted one \(capacity.age at iteration 3, was eligible\)"):
        store.read([str(id)])
    with pytest.raises(ContentGone):
        questions.tokens(store, str(id))
    summary = questions.summary(store)
    assert (summary["trajectories"], summary["reclaimed"], summary["groups"]) == (16, 8, 6)
    about = questions.task(store, "task-1")
    # Groups of 4 with rates 0.5 and 0.25 in each of three iterations.
    assert (about["attempts"], about["successes"], about["groups_in_all"], about["eligible"]) == (24, 9, 6, 16)
    assert [group["eligible"] for group in about["groups"]] == [4, 4, 4, 4, 0, 0]
    assert (about["first_iteration"], about["last_iteration"]) == (1, 3)
    output = ask("show", str(id), str(location)).output
    assert f"evicted ({reason})" in output
    assert "its tokens are gone" in output
    assert f"evicted ({reason})" in ask("lineage", "1", str(location)).output
    store.close()


def test_verify_and_export_know_reclaimed_rows(location: Location, tmp_path: Path) -> None:
    store = trained(location)
    reclaim(store, 3, age=1)
    found = store.verify()
    assert (found.checked, found.dangling, found.corrupt, found.damage) == (16, {}, {}, [])
    assert export_file(store, tmp_path / "rows.jsonl").rows == 16
    sql(store, "delete from reclaimed where slot = 0")
    uses = counts(store, "draws where trajectory not in (select id from trajectories union select id from reclaimed)")
    assert store.verify().dangling == {"draws.trajectory": uses[0]}
    assert uses[0] >= 1


def test_redacted_row_counts_as_kept_until_a_limit_evicts_it(store: ReplayStore) -> None:
    rows = [trajectory(f"r{slot}", slot=slot) for slot in range(4)]
    store.append([task()], [group()], rows[:2], redact=lambda said: said[:1])
    store.append([task()], [group()], rows[2:])
    state = "select state, state_reason from trajectories where id = 'r0'"
    assert store.purge(RUN, 9) == 0
    # 4 rows, one too many: what can't be drawn goes first.
    metrics = store.evict(RUN, 2, policy_version=2, capacity=Capacity(rows=3))
    assert (metrics["buffer/rows"], metrics["buffer/evicted"]) == (3, 1)
    assert sql(store, state) == [("evicted", "capacity.rows at iteration 2, was redacted")]
    store.resume(RUN, 1)
    assert sql(store, state) == [("evicted", "redacted")]
    assert reclaim(store, 2, rows=3) == 1
    assert counts(store, "trajectories", "messages", "reclaimed") == [3, 3, 1]


@contextmanager
def counted_steps() -> Iterator[list[int]]:
    """Instructions of SQLite's virtual machine, in hundreds, that statements take from here on."""
    steps = [0]

    def step() -> int:
        steps[0] += 1
        return 0

    def count(connection: sa.Connection, *_: Any) -> None:
        driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(step, 100)

    sa.event.listen(sa.Engine, "before_cursor_execute", count)
    yield steps
    sa.event.remove(sa.Engine, "before_cursor_execute", count)


def test_work_of_an_iteration_does_not_grow_with_rows_that_went(tmp_path: Path) -> None:
    store = new_store(tmp_path / "replay.sqlite")
    sampler = make_sampler("uniform", 0)
    found = {}
    for iteration in range(1, 61):
        with counted_steps() as steps:
            FreshRows(iteration, rates=(0.5, 0.5)).append_to(store)
            store.available(request(iteration, 0), sampler)
            reclaim(store, iteration, rows=40, age=30, staleness=30, per_task=40)
        found[iteration] = steps[0]
    assert counts(store, "trajectories", "reclaimed") == [40, 440]
    # 10 iterations of 8 rows had gone by, and 55.
    assert found[60] <= 1.1 * found[15]
    store.close()
