"""Several processes at once, and processes that die."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from replay import ReplayStore
from tests.replay.fakes import group, new_store, sql, task, trajectory

FORK = multiprocessing.get_context("fork")
TABLES = ("trajectories", "segments", "messages")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    store = new_store(tmp_path / "replay.sqlite")
    store.append([task()], [group()], [])
    store.close()
    return store.path


def write(path: Path, writer: int, count: int, acknowledged: int) -> None:
    """Append one by one; an id goes down the pipe once its append has returned."""
    store = ReplayStore.open(path)
    for i in range(count):
        id = f"{writer:02d}-{i:05d}"
        store.append([], [], [trajectory(id)])
        os.write(acknowledged, f"{id}\n".encode())
    store.close()


def start(path: Path, writer: int, count: int) -> tuple[FORK.Process, int]:  # type: ignore[name-defined]  # a context's own class
    receiving, sending = os.pipe()
    process = FORK.Process(target=write, args=(path, writer, count, sending))
    process.start()
    os.close(sending)
    return process, receiving


def drain(receiving: int) -> list[str]:
    with os.fdopen(receiving) as stream:
        return [line.strip() for line in stream if line.endswith("\n")]


def check_whole(path: Path, at_least: list[str]) -> int:
    """Everything visible reads back whole, and everything acknowledged is visible."""
    store = ReplayStore.open(path, read_only=True)
    ids = [id for (id,) in sql(path, "select id from trajectories")]
    assert set(at_least) <= set(ids)
    for row in store.read(ids):
        assert (len(row.segments), len(row.messages)) == (1, 5)
    store.close()
    return len(ids)


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


def test_four_writers_lose_nothing_and_a_reader_sees_no_half(path: Path) -> None:
    writers = [start(path, writer, 50) for writer in range(4)]
    seen = 0
    while any(process.is_alive() for process, _ in writers):
        found = check_whole(path, [])
        assert found >= seen
        seen = found
    for process, _ in writers:
        process.join()
        assert process.exitcode == 0
    acknowledged = [id for _, receiving in writers for id in drain(receiving)]
    assert len(acknowledged) == 200
    assert check_whole(path, acknowledged) == 200


def test_kill_of_a_writer_loses_nothing_that_was_acknowledged(path: Path) -> None:
    chance = random.Random(1)
    total = 0
    for writer in range(10):
        process, receiving = start(path, writer, 100_000)
        before = sql(path, "select count(*) from trajectories")[0][0]
        wait_for(lambda before=before: sql(path, "select count(*) from trajectories")[0][0] > before)  # type: ignore[misc]  # bound now
        time.sleep(chance.uniform(0.0, 0.08))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        acknowledged = drain(receiving)
        found = check_whole(path, acknowledged)
        # The last commit may have been done and not told.
        assert found - total - len(acknowledged) in (0, 1)
        total = found
    assert sql(path, "pragma integrity_check") == [("ok",)]
    assert sql(path, "select count(*) from segments") == [(total,)]
    # What was killed is sent again, and is there once.
    store = ReplayStore.open(path)
    assert store.append([], [], [trajectory("00-00000")]).duplicates == 1
