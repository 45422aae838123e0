"""Killed at every statement and every commit: what was begun is done or not begun, and can be done again."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from replay import ReplayStore
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from replay.storage.format.schema import metadata
from tests.fakes.databases import Databases
from tests.fakes.records import RUN, FreshRows, iterate, iteration_record, measured, new_store, request, sql, task
from tests.fakes.small_processes import SMALL
from tests.replay.storage.collecting.episodes import claim, episode, issue

Work = Callable[[Location, Callable[[], None]], None]
"""Does one thing after another to a database, and tells after each that it returned."""

STEPS = (
    (sa.Engine, "after_cursor_execute"),  # Nothing happens between this and the next statement.
    (sa.Engine, "commit"),
    (sa.Pool, "checkin"),  # When a connection is given back, its commit has been answered.
)


@dataclass(frozen=True)
class Ended:
    """How a process did."""

    told: int
    """Things that returned."""
    steps: int | None
    """That its work takes; None: it was killed before its end."""


def killed_at(step: int | None, work: Work, location: Location) -> Ended:
    """The work in a process of its own, killed with -9 when it comes to that step; None: never."""
    receiving, sending = SMALL.Pipe(duplex=False)
    child = SMALL.Process(target=_work, args=(step, work, location, sending))
    child.start()
    sending.close()
    told = []
    with receiving, suppress(EOFError):
        while True:
            told.append(receiving.recv())
    child.join()
    if child.exitcode == -signal.SIGKILL:
        return Ended(len(told), None)
    assert child.exitcode == 0, "the work failed by itself"
    return Ended(len(told) - 1, told[-1])


def _work(step: int | None, work: Work, location: Location, sending: Connection) -> None:
    gc.disable()  # A look at all that was imported would take as long as the work.
    passed = 0

    def pass_one(*given: Any) -> None:
        nonlocal passed
        if passed == step:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    for target, event in STEPS:
        sa.event.listen(target, event, pass_one)
    work(location, lambda: sending.send(None))
    sending.send(passed)


CLOCKS = {"created_at", "started_at", "seen_at", "issued_at", "ended_at", "due", "leader_due"}


def contents(location: Location, *, but: frozenset[str] = frozenset()) -> dict[str, list[tuple[Any, ...]]]:
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


def check_steps(new_location: Callable[[str], Location], *, every: int) -> None:
    """What stands there is what stood there after the last thing told, or after the one that was going on.

    `every`: killed at each so-many-th step, and at the last one.
    """

    def prepared(name: object) -> Location:
        location = new_location(f"{name}.sqlite")
        with closing(new_store(location)) as store:
            iterate(store, 1, make_sampler("uniform", 0))
            issue(store, [0], iteration=9)
        return location

    whole = prepared("whole")
    states = [contents(whole)]
    learn(whole, lambda: states.append(contents(whole)))
    steps = killed_at(None, learn, prepared("counted")).steps
    # Statements and commits of eight transactions.
    assert steps is not None and steps > 50
    ends = []
    for step in sorted({*range(0, steps, every), steps - 1}):
        location = prepared(step)
        told = killed_at(step, learn, location).told
        found = states.index(contents(location))
        assert found in (told, told + 1), f"killed at step {step}"
        if found not in ends:
            send_again(location, stored=found > 0)
        ends.append(found)
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
def test_kill_at_every_step_leaves_all_or_nothing(new_location: Callable[[str], Location]) -> None:
    check_steps(new_location, every=1)


def create(location: Location, told: Callable[[], None]) -> None:
    ReplayStore.create(location).close()
    told()


@pytest.mark.soak
@pytest.mark.every_database
@pytest.mark.every_server
def test_kill_at_every_step_of_making_the_tables_leaves_all_or_none(databases: Databases, tmp_path: Path) -> None:
    steps = killed_at(None, create, databases.new(tmp_path / "counted.sqlite", empty=True)).steps
    assert steps is not None and steps > 10
    tables = "sqlite_master where type = 'table'" if databases.is_sqlite else "pg_tables where schemaname = 'public'"
    ends = []
    for step in range(steps):
        location = databases.new(tmp_path / f"{step}.sqlite", empty=True)
        killed_at(step, create, location)
        ends.append(len(sql(location, f"select 1 from {tables}")))
        ReplayStore.create(location).close()
    assert set(ends) == {0, len(metadata.tables) + 1} and ends == sorted(ends)
