"""Killed at every statement and every commit: what was begun is done or not begun, and can be done again."""

import gc
import os
import signal
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import pytest
import sqlalchemy as sa

from replay import ReplayStore
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from replay.storage.format.schema import metadata
from tests.fakes.databases import Databases
from tests.fakes.records import RUN, Fresh, iterate, iteration_record, measured, new_store, request, sql
from tests.fakes.small_processes import Child
from tests.replay.storage.collecting.episodes import claim, episode, issue

STEPS = (
    (sa.Engine, "after_cursor_execute"),  # Nothing happens between this and the next statement.
    (sa.Engine, "commit"),
    (sa.Pool, "checkin"),  # When a connection is given back, its commit has been answered.
)


def killed_at(step: int | None, location: Location) -> tuple[int, int | None]:
    """`learn` in a process of its own, killed with -9 when it comes to that step; None: never.

    How many things returned, and the steps that all of it takes; None: it was killed before its end.
    """
    child = Child.start(_work, step, location)
    returned = child.said()
    if child.process.exitcode == -signal.SIGKILL:
        return len(returned), None
    assert child.process.exitcode == 0, "the work failed by itself"
    return len(returned) - 1, returned[-1]


def _work(sending: Connection, step: int | None, location: Location) -> None:
    gc.disable()  # A look at all that was imported would take as long as the work.
    passed = 0

    def pass_one(*given: Any) -> None:
        nonlocal passed
        if passed == step:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    for target, event in STEPS:
        sa.event.listen(target, event, pass_one)
    learn(location, lambda: sending.send(None))
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
    """An iteration: append, reserve, draw, commit; two episodes of a worker. Then back to the iteration before.

    Calls `told` after each thing that it did.
    """
    with closing(ReplayStore.open(location)) as store:
        sampler = make_sampler("uniform", 1)
        collected = Fresh(2).append_to(store)
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


@pytest.mark.slow
@pytest.mark.every_database
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=[pytest.mark.soak, pytest.mark.every_server])])
def test_kill_leaves_all_or_nothing(databases: Databases, new_location: Callable[[str], Location], every: int) -> None:
    """What stands there is what stood there after the last thing that returned, or after the one that was going on.

    `every`: killed at each so-many-th step, and at the last one.
    """
    if every > 1 and not databases.is_sqlite:
        every = 12

    def prepared(name: object) -> Location:
        location = new_location(f"{name}.sqlite")
        with closing(new_store(location)) as store:
            iterate(store, 1)
            issue(store, [0], iteration=9)
        return location

    whole = prepared("whole")
    states = [contents(whole)]
    learn(whole, lambda: states.append(contents(whole)))
    _, steps = killed_at(None, prepared("counted"))
    # Statements and commits of eight transactions.
    assert steps is not None and steps > 50
    ends = []
    for step in sorted({*range(0, steps, every), steps - 1}):
        location = prepared(step)
        told, _ = killed_at(step, location)
        found = states.index(contents(location))
        assert found in (told, told + 1), f"killed at step {step}"
        ends.append(found)
    # Each is lost at some of the steps and there at others.
    assert ends == sorted(ends) and len(set(ends)) >= (8 if every == 1 else 5)
