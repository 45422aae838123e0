"""What a store promises, on every database: the same calls leave the same rows and are answered alike."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from replay import CorruptTrajectory, Limits, ReplayError, ReplayStore, RunReplaced, make_sampler
from replay.storage.databases import Location
from replay.storage.format.schema import trajectories
from replay.storage.retention import Capacity
from tests.fakes.databases import Databases
from tests.fakes.records import (
    RUN,
    Fresh,
    a_run,
    iterate,
    iteration_record,
    new_store,
    policy,
    put,
    request,
    sql,
    task,
    trajectory,
)
from tests.replay.storage.collecting.episodes import issue
from tests.replay.storage.filled_buffers import QUESTIONS, fill
from tests.replay.storage.test_kill_points import contents

pytestmark = pytest.mark.every_database

ZEROS = np.zeros(6, np.float32)


@pytest.fixture
def filled(location: Location) -> Location:
    fill(location)
    return location


def test_the_same_calls_leave_the_same_rows_and_answers(filled: Location, tmp_path: Path) -> None:
    fill(tmp_path / "file.sqlite")
    # A file holds messages compressed.
    there, in_a_file = (contents(each, but=frozenset({"said"})) for each in (filled, tmp_path / "file.sqlite"))
    assert {name for name, rows in there.items() if not rows} == set()
    for name, rows in in_a_file.items():
        assert there[name] == rows, name
    with closing(ReplayStore.open(filled, read_only=True)) as store:
        found = store.verify()
    assert (found.corrupt, found.damage) == ({}, [])
    answers = []
    for location in (filled, tmp_path / "file.sqlite"):
        with closing(ReplayStore.open(location, read_only=True)) as store:
            found = {name: ask(store) for name, ask in QUESTIONS.items() if name not in ("workers", "engines")}
        answers.append({name: without_place(answer) for name, answer in found.items()})
    for name, answer in answers[1].items():
        assert answers[0][name] == answer, name


def without_place(answer: Any) -> Any:
    if isinstance(answer, dict):
        left_out = {"database", "bytes", "started_at", "created_at", "seconds_since"}
        return {name: without_place(value) for name, value in answer.items() if name not in left_out}
    return [without_place(each) for each in answer] if isinstance(answer, list) else answer


@pytest.mark.parametrize(("table", "change"), [("trajectories", "reward = -1.0"), ("segments", "reason = 'fork'")])
def test_row_that_was_changed_is_quarantined_and_never_trained_on(store: ReplayStore, table: str, change: str) -> None:
    put(store, trajectory("a"), trajectory("b", slot=1))
    sql(store, f"update {table} set {change} where {'id' if table == 'trajectories' else 'trajectory'} = 'a'")
    assert [row.trajectory.id for row in store.draw(request(2, 2), make_sampler("uniform", 0))] == ["b"]
    assert sql(store, "select id from trajectories where state = 'quarantined'") == [("a",)]
    with pytest.raises(CorruptTrajectory):
        store.read(["a"])


def test_draws_do_not_depend_on_the_database_the_row_order_or_the_clock(location: Location, tmp_path: Path) -> None:
    drawn = []
    for number, place in enumerate((location, tmp_path / "file.sqlite")):
        with closing(new_store(place)) as store:
            for iteration in (2, 1) if number else (1, 2):
                rows = Fresh(iteration, rates=(0.5, 0.25, 0.75), size=5)
                store.append([task()], rows.groups, rows.trajectories[:: -1 if number else 1])
            sql(store, "update trajectories set created_at = '1970-01-01T00:00:' || (70 - iteration)")
            found = store.draw(request(3, 6), make_sampler("success", 4))
            drawn.append([(row.trajectory.id, row.draw.slot, row.draw.probability) for row in found])
    assert drawn[0] == drawn[1] and len(drawn[0]) == 6


def test_resumed_run_draws_and_keeps_what_the_unbroken_one_does(new_location: Callable[[str], Location]) -> None:
    def run(store: ReplayStore, sampler: Any, iterations: range, attempt: int = 0) -> list[Any]:
        drawn = []
        for iteration in iterations:
            limits = Limits(successful_only=False, max_uses=3)
            ids = iterate(store, iteration, sampler, count=3, attempt=attempt, limits=limits)
            drawn.append([(row.record.iteration, row.record.slot) for row in store.read(ids)])
            store.evict(RUN, iteration, Capacity(rows=14, age=2))
            if iteration % 3 == 0:
                store.purge(RUN, iteration)
        return drawn

    with closing(new_store(new_location("a"))) as unbroken, closing(new_store(new_location("b"))) as broken:
        expected = run(unbroken, make_sampler("recency", 3), range(1, 9))
        run(broken, make_sampler("recency", 3), range(1, 6))
        # The checkpoint is that of iteration 3: what iterations 4 and 5 evicted comes back.
        report = broken.resume(RUN, 3)
        assert broken.verify().damage == []  # uses of rows are those of the draws that are left
        sampler = make_sampler("recency", 99)
        sampler.load_state(json.loads(json.dumps(report.sampler_state)))
        assert run(broken, sampler, range(4, 9), attempt=report.next_attempt) == expected[3:]
        assert sum(map(len, expected)) > 15


WRITES: dict[str, Callable[[ReplayStore], Any]] = {
    "add_policy": lambda store: store.add_policy(policy(7)),
    "append": lambda store: Fresh(4).append_to(store),
    "groups": lambda store: store.append([], Fresh(4).groups, []),
    "reserve_fresh": lambda store: store.reserve_fresh(Fresh(4).draws()),
    "draw": lambda store: store.draw(request(3, 2), make_sampler("uniform", 0)),
    "commit": lambda store: store.commit(iteration_record(3, replay=0), Fresh(3).draws(), sampler_state={}),
    "add_metrics": lambda store: store.add_metrics(RUN, 2, {"eval/success": 0.5}),
    "add_scores": lambda store: store.add_scores(RUN, 1, {(Fresh(3).trajectories[0].id, 0): ZEROS}),
    "evict": lambda store: store.evict(RUN, 3, Capacity(rows=1)),
    "purge": lambda store: store.purge(RUN, 3),
    "issue": lambda store: issue(store, [0]),
    "refuse_replaced": lambda store: store.refuse_replaced(RUN),
}


def test_store_whose_run_was_resumed_by_another_writes_nothing_of_it(location: Location) -> None:
    with closing(new_store(location)) as first, closing(ReplayStore.open(location)) as second:
        first.resume(RUN, 0)
        for iteration in (1, 2):
            iterate(first, iteration, make_sampler("uniform", 1))
        first.evict(RUN, 2, Capacity(rows=1))
        second.resume(RUN, 2)
        Fresh(3).append_to(second)
        second.reserve_fresh(Fresh(3).draws())
        before = contents(location)
        for name, write in WRITES.items():
            with pytest.raises(RunReplaced, match="got epoch 2 where this process began epoch 1: run-1 was resumed by"):
                write(first)
            assert contents(location) == before, name
        # It may look, and the one that took over goes on; so does a tool that only adds to the run.
        assert first.available(request(3, 2), make_sampler("uniform", 0)).rows > 0
        with closing(ReplayStore.open(location)) as tool:
            tool.add_run(a_run())
            tool.add_scores(RUN, 1, {(Fresh(3).trajectories[0].id, 0): ZEROS})
        WRITES["draw"](second)
        WRITES["append"](second)


def test_creation_at_once_makes_one_database(databases: Databases, tmp_path: Path) -> None:
    location = databases.new(tmp_path / "replay.sqlite", empty=True)
    with ThreadPoolExecutor(8) as pool:
        for store in pool.map(ReplayStore.create, [location] * 8):
            store.close()
    assert sql(location, "select name, value from buffer_state order by 1") == [("changed", 1), ("draws", 0)]
    assert sql(location, "select count(*) from replay_schema_version") == [(1,)]


def test_read_only_store_writes_nothing(location: Location) -> None:
    new_store(location).close()
    with closing(ReplayStore.open(location, read_only=True)) as reader, pytest.raises(ReplayError, match="read-?only"):
        reader.append([task()], [], [])


def test_reader_sees_one_moment(location: Location) -> None:
    with closing(new_store(location)) as writer, closing(ReplayStore.open(location, read_only=True)) as reader:
        counted = sa.select(sa.func.count()).select_from(trajectories)
        with reader.reading() as connection:
            assert connection.scalar(counted) == 0
            put(writer, trajectory("a"))
            assert connection.scalar(counted) == 0
        with reader.reading() as connection:
            assert connection.scalar(counted) == 1
