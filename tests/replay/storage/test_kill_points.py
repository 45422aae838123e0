"""Killed at every statement and every commit: what was begun is done or not begun, and can be done again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from replay import ReplayStore
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from replay.storage.format.schema import metadata
from tests.fakes.databases import Databases
from tests.fakes.records import RUN, FreshRows, iterate, iteration_record, measured, new_store, request, sql, task
from tests.replay.storage.collecting.episodes import claim, episode, issue
from tests.replay.storage.kill_points import Copies, copies, killed_at

CLOCKS = {"created_at", "started_at", "seen_at", "issued_at", "ended_at", "due", "leader_due"}

Contents = dict[str, list[tuple[Any, ...]]]


def contents(location: Location, *, but: frozenset[str] = frozenset()) -> Contents:
    """Every row of every table, but for times of day and the columns `but`. Booleans are numbers in a file."""
    found = {}
    for name, table in metadata.tables.items():
        columns = ", ".join(f'"{column.name}"' for column in table.columns if column.name not in CLOCKS | but)
        rows = sql(location, f'select {columns} from "{name}"')
        plain = [tuple(int(each) if isinstance(each, bool) else each for each in row) for row in rows]
        found[name] = sorted(plain, key=repr)
    return found


def learn(location: Location, told: Callable[[], None]) -> None:
    """An iteration: append, reserve, draw, commit; two episodes of a worker. Then back to the iteration before."""
    with closing(ReplayStore.open(location)) as store:
        sampler = make_sampler("uniform", 1)
        collected = FreshRows(2).append_to(store)
        told()
        fresh = collected.draws()
        store.reserve_fresh(fresh)
        told()
        drawn = store.draw(request(2, 2), sampler)
        told()
        records = measured([*fresh, *(row.draw for row in drawn)])
        store.commit(iteration_record(2, replay=len(drawn)), records, sampler_state=sampler.state())
        told()
        held = claim(store, count=2)
        told()
        assert store.tickets.finish([(each, episode(each)) for each in held]) == [True, True]
        told()
        store.resume(RUN, 1)
        told()


def prepare(made: Copies) -> None:
    with closing(new_store(made.prepared)) as store:
        iterate(store, 1, make_sampler("uniform", 0))
        issue(store, [0], iteration=9)


def check_steps(databases: Databases, *, every: int) -> None:
    """What stands there is what stood there after the last thing told, or after the one that was going on.

    `every`: killed at each so-many-th step, and at the last one.
    """
    with copies(databases) as made:
        prepare(made)
        states = [contents(made.prepared)]
        whole = made.new()
        learn(whole, lambda: states.append(contents(whole)))
        steps = killed_at(None, learn, made.new()).steps
        # Statements and commits of eight transactions.
        assert steps is not None and steps > 50
        ends = []
        for step in sorted({*range(0, steps, every), steps - 1}):
            location = made.new()
            told = killed_at(step, learn, location).told
            found = states.index(contents(location))
            assert found in (told, told + 1), f"killed at step {step}"
            if found not in ends:
                send_again(location, stored=found > 0)
            ends.append(found)
            made.drop(location)
        # Each is lost at some of the steps and there at others.
        assert ends == sorted(ends) and len(set(ends)) >= (8 if every == 1 else 5)


def send_again(location: Location, *, stored: bool) -> None:
    """Every row of what was killed is there exactly once."""
    with closing(ReplayStore.open(location)) as store:
        collected = FreshRows(2)
        report = store.append([task()], collected.groups, collected.trajectories)
        assert (report.inserted, report.duplicates) == ((0, 4) if stored else (4, 0))
        # 8 of iteration 1 and 4 of iteration 2, each of one segment and one conversation; and those of a worker.
        for table in ("trajectories", "segments", "messages"):
            query = f"select count(*) from {table} where {'id' if table == 'trajectories' else 'trajectory'} "
            assert sql(location, query + "not like 'row-%'") == [(12,)]
        assert len(store.read([row.id for row in collected.trajectories])) == 4


@pytest.mark.soak
@pytest.mark.every_database
@pytest.mark.every_server
def test_kill_at_every_step_leaves_all_or_nothing(databases: Databases) -> None:
    check_steps(databases, every=1)


def create(location: Location, told: Callable[[], None]) -> None:
    ReplayStore.create(location).close()
    told()


@pytest.mark.soak
@pytest.mark.every_database
@pytest.mark.every_server
def test_kill_at_every_step_of_making_the_tables_leaves_all_or_none(databases: Databases) -> None:
    with copies(databases, empty=True) as made:
        if isinstance(made.prepared, Path):
            made.prepared.touch()
        steps = killed_at(None, create, made.new()).steps
        assert steps is not None and steps > 10
        ends = []
        for step in range(steps):
            location = made.new()
            killed_at(step, create, location)
            is_file = isinstance(location, Path)
            tables = "sqlite_master where type = 'table'" if is_file else "pg_tables where schemaname = 'public'"
            ends.append(len(sql(location, f"select 1 from {tables}")))
            ReplayStore.create(location).close()
            made.drop(location)
        assert set(ends) == {0, len(metadata.tables) + 1} and ends == sorted(ends)
