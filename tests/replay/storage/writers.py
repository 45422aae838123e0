import time
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

from replay import ReplayStore
from replay.storage.databases import Location
from tests.fakes.records import group, new_store, sql, task, trajectory
from tests.fakes.small_processes import SMALL, Child


def begin(location: Location) -> None:
    with closing(new_store(location)) as store:
        store.append([task()], [group()], [])


class Writer:
    """A process that appends trajectories one by one, and says so as soon as each append has returned."""

    def __init__(self, location: Location, number: int, count: int, *, pause_s: float = 0.0) -> None:
        self._stop = SMALL.Event()
        self._child = Child.start(_write, location, number, count, pause_s, self._stop)
        self.process = self._child.process
        self.seconds: list[float] = []
        """How long each acknowledged append took."""

    def stop(self) -> None:
        self._stop.set()

    def acknowledged(self) -> list[str]:
        said = self._child.said()
        self.seconds = [seconds for _, seconds in said]
        return [id for id, _ in said]


def _write(sending: Connection, location: Location, number: int, count: int, pause_s: float, stop: Any) -> None:
    with closing(ReplayStore.open(location)) as store:
        for i in range(count):
            if stop.wait(pause_s if i else 0.0):
                break
            id, began = f"{number:03d}-{i:05d}", time.monotonic()
            store.append([], [], [trajectory(id)])
            sending.send((id, time.monotonic() - began))


def stored_ids(location: Location) -> list[str]:
    return [id for (id,) in sql(location, "select id from trajectories order by id")]


def check_whole(location: Location, ids: Sequence[str]) -> None:
    """Every row reads back with its hash, its one segment and its five messages."""
    with closing(ReplayStore.open(location, read_only=True)) as store:
        for start in range(0, len(ids), 500):
            assert {(len(row.segments), len(row.messages)) for row in store.read(ids[start : start + 500])} == {(1, 5)}


def check_counts(location: Location, count: int, *, sent_again: bool = False) -> None:
    """No part of a trajectory without the rest, and one change counted for every append."""
    for table in ("trajectories", "segments", "messages"):
        assert sql(location, f"select count(*) from {table}") == [(count,)]
    # 1 from the start, and the append of the group. One that was sent again counts again.
    changes = sql(location, "select value from buffer_state where name = 'changed'")[0][0]
    assert changes >= 2 + count if sent_again else changes == 2 + count


def check_kept(location: Location, writers: Sequence[Writer], *, sent_again: bool = False) -> int:
    """How many were: all of them are there, whole; what was on its way when a writer ended may be, whole."""
    acknowledged = [id for writer in writers for id in writer.acknowledged()]
    there = stored_ids(location)
    assert set(acknowledged) <= set(there)
    assert len(there) - len(acknowledged) <= len(writers)
    check_whole(location, there)
    check_counts(location, len(there), sent_again=sent_again)
    return len(acknowledged)


def wait_for(condition: Callable[[], bool], *, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)
