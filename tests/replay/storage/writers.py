"""Processes that write into one buffer until they are done or killed, and what must hold afterwards."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from replay import ReplayStore
from replay.storage.databases import Location
from tests.fakes.records import group, new_store, sql, task, trajectory
from tests.fakes.small_processes import SMALL


def begin(location: Location) -> None:
    """A run, a task and a group that members can be appended to."""
    store = new_store(location)
    store.append([task()], [group()], [])
    store.close()


@dataclass
class Writer:
    """A process that appends trajectories one by one; an id goes down the pipe once its append has returned."""

    process: SMALL.Process  # type: ignore[name-defined]  # a context's own class
    _receiving: Connection
    _stop: Any

    @classmethod
    def start(cls, location: Location, number: int, count: int) -> Writer:
        receiving, sending = SMALL.Pipe(duplex=False)
        stop = SMALL.Event()
        process = SMALL.Process(target=_write, args=(location, number, count, sending, stop))
        process.start()
        sending.close()
        return cls(process, receiving, stop)

    def stop(self) -> None:
        """After the append it is at."""
        self._stop.set()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def acknowledged(self) -> list[str]:
        """Waits for the process to end."""
        ids = []
        with self._receiving, suppress(EOFError):
            while True:
                ids.append(self._receiving.recv())
        self.process.join()
        return ids


def _write(location: Location, number: int, count: int, sending: Connection, stop: Any) -> None:
    store = ReplayStore.open(location)
    for i in range(count):
        if stop.is_set():
            break
        id = f"{number:03d}-{i:05d}"
        store.append([], [], [trajectory(id)])
        sending.send(id)
    store.close()


def stored_ids(location: Location) -> list[str]:
    return [id for (id,) in sql(location, "select id from trajectories order by id")]


def check_whole(location: Location, ids: Sequence[str]) -> None:
    """Every row reads back with its hash, its one segment and its five messages."""
    store = ReplayStore.open(location, read_only=True)
    for start in range(0, len(ids), 500):
        for row in store.read(ids[start : start + 500]):
            assert (len(row.segments), len(row.messages)) == (1, 5)
    store.close()


def check_counts(location: Location, count: int, *, sent_again: bool = False) -> None:
    """No part of a trajectory without the rest, and one change counted for every append."""
    for table, each in (("trajectories", 1), ("segments", 1), ("messages", 1)):
        assert sql(location, f"select count(*) from {table}") == [(count * each,)]
    # 1 from the start, and the append of the group. One that was sent again counts again.
    changes = sql(location, "select value from buffer_state where name = 'changed'")[0][0]
    assert changes >= 2 + count if sent_again else changes == 2 + count


def check_acknowledged(location: Location, writers: Sequence[Writer], *, sent_again: bool = False) -> int:
    """All that was told to be stored is there, whole; what was on its way when a writer ended may be, whole."""
    told = [id for writer in writers for id in writer.acknowledged()]
    there = stored_ids(location)
    assert set(told) <= set(there)
    assert len(there) - len(told) <= len(writers)
    check_whole(location, there)
    check_counts(location, len(there), sent_again=sent_again)
    return len(told)


def kill_writers(location: Location, kills: int) -> None:
    """F1: a writer is killed at a random moment, again and again."""
    chance = random.Random(1)
    count = 0
    for number in range(kills):
        writer = Writer.start(location, number, 100_000)
        before = len(stored_ids(location))
        wait_for(lambda before=before: len(stored_ids(location)) > before)  # type: ignore[misc]  # bound now
        time.sleep(chance.uniform(0.0, 0.05))
        writer.kill()
        told = writer.acknowledged()
        mine = [id for id in stored_ids(location) if id.startswith(f"{number:03d}-")]
        assert set(told) <= set(mine)
        # The last commit may have been done and not told.
        assert len(mine) - len(told) in (0, 1)
        check_whole(location, mine)
        count += len(mine)
    check_counts(location, count)
    # What was killed is sent again, and is there once.
    store = ReplayStore.open(location)
    again = [trajectory(id) for id in stored_ids(location)[:100]]
    assert store.append([], [], again).duplicates == len(again)
    assert len(stored_ids(location)) == count
    store.close()


def wait_for(condition: Callable[[], bool], *, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)
