"""Power cuts at random moments, on disks that keep of unflushed writes what they like.

The programs whose writes are recorded say what is stored as soon as that is acknowledged:
`python -m tests.soak.test_power_cut append|learn FILE`
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from replay import ReplayStore
from replay.sampling.samplers import make_sampler
from tests.fakes.records import RUN, iterate, new_store, policy, run_record, sql, trajectory
from tests.replay.storage.writers import begin, check_whole, stored_ids
from tests.soak.recorded_disk import STRACE, Recording, images, record

WRITERS = 3
ROUNDS = 4
"""A writer closes the file after each, and opens it again."""
EACH = 4
ITERATIONS = 8
PAGES = 60
"""In the log when it is moved into the file: it is filled and emptied several times."""


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def small_log(connection: sa.PoolProxiedConnection, record: object) -> None:
    connection.execute(f"pragma wal_autocheckpoint={PAGES}")


def create(path: Path) -> None:
    """The library's own writes make the file, not a copy's."""
    ReplayStore.create(path).close()


def append(path: Path) -> None:
    create(path)
    begin(path)
    say("begun")
    with get_context("fork").Pool(WRITERS) as pool:
        pool.starmap(append_some, [(path, number) for number in range(WRITERS)])


def append_some(path: Path, writer: int) -> None:
    for number in range(ROUNDS):
        with closing(ReplayStore.open(path)) as store:
            for each in range(EACH):
                id = f"{writer}-{number}-{each}"
                store.append([], [], [trajectory(id)])
                say(f"stored {id}")


def learn(path: Path) -> None:
    create(path)
    with closing(new_store(path)) as store:
        say("begun")
        for iteration in range(1, ITERATIONS + 1):
            iterate(store, iteration, make_sampler("uniform", iteration))
            say(f"committed {iteration}")


pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(STRACE is None, reason="writes are recorded by strace, which is not installed"),
]

IMAGES = 200
"""Of each of appending and learning."""
NAME = "replay.sqlite"


def recorded(folder: Path, work: str) -> Recording:
    return record(folder, [sys.executable, "-m", "tests.soak.test_power_cut", work, str(folder / NAME)])


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def check_sound(path: Path) -> None:
    assert sql(path, "pragma integrity_check") == [("ok",)]
    assert sql(path, "pragma foreign_key_check") == []
    with closing(ReplayStore.open(path, read_only=True)) as store:
        assert store.verify().corrupt == {}


def test_power_cut_loses_no_row_that_was_stored(disk: Path, tmp_path: Path) -> None:
    recording = recorded(disk, "append")
    assert len(recording.said) == 1 + WRITERS * ROUNDS * EACH

    def check(path: Path, told: list[str]) -> None:
        if "begun" not in told:
            begin(path)
        stored = {line.removeprefix("stored ") for line in told if line.startswith("stored ")}
        there = stored_ids(path)
        assert stored <= set(there)
        assert len(there) - len(stored) <= WRITERS
        check_whole(path, there)
        check_sound(path)
        with closing(ReplayStore.open(path)) as store:
            store.append([], [], [trajectory("afterwards")])
        assert set(stored_ids(path)) == {*there, "afterwards"}

    print(len(recording.stretches), "flushes", images(recording, tmp_path, IMAGES, check, name=NAME))


def updates(path: Path, last: int) -> list[list[tuple[Any, ...]]]:
    """Everything about them that does not tell the time."""
    draws = (
        "select iteration, slot, trajectory, state, staleness, drift_mean from draws where iteration <= ? order by 1, 2"
    )
    metrics = "select * from metrics where iteration <= ? order by run, iteration, name"
    rows = "select id, record_checksum from trajectories where iteration <= ? order by id"
    return [sql(path, query, last) for query in (draws, metrics, rows)]


def test_power_cut_loses_no_update_that_was_committed(disk: Path, tmp_path: Path) -> None:
    recording = recorded(disk, "learn")
    assert len(recording.said) == 1 + ITERATIONS

    def check(path: Path, told: list[str]) -> None:
        committed = max(0, len(told) - 1)
        with closing(ReplayStore.create(path)) as store:
            if not told:
                store.add_run(run_record())
                store.add_policy(policy(0))
            there = sql(path, "select coalesce(max(iteration), 0) from iterations")[0][0]
            assert there in (committed, committed + 1)
            assert updates(path, there) == updates(disk / NAME, there)
            # Of the next iteration: all rows of its one append, or none.
            assert sql(path, "select count(*) from trajectories") in ([(8 * there,)], [(8 * there + 8,)])
            check_whole(path, stored_ids(path))
            check_sound(path)
            store.resume(RUN, there)
            iterate(store, there + 1, make_sampler("uniform", 0), attempt=1)

    print(len(recording.stretches), "flushes", images(recording, tmp_path, IMAGES, check, name=NAME))


if __name__ == "__main__":
    sa.event.listen(sa.Pool, "connect", small_log)
    {"append": append, "learn": learn}[sys.argv[1]](Path(sys.argv[2]))
