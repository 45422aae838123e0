"""Power cuts at random moments, on disks that keep of unflushed writes what they like.

The program whose writes are recorded, `python -m tests.soak.test_power_cut FILE`, says what is committed.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from replay import ReplayStore
from replay.sampling.samplers import make_sampler
from tests.fakes.records import RUN, iterate, new_store, policy, run_record, sql
from tests.replay.storage.writers import check_whole, stored_ids
from tests.soak.recorded_disk import STRACE, images, record

ITERATIONS = 8
PAGES = 60
"""In the log when it is moved into the file: it is filled and emptied several times."""


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def learn(path: Path) -> None:
    ReplayStore.create(path).close()  # the library's own writes make the file, not a copy's
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
NAME = "replay.sqlite"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def check_sound(path: Path) -> None:
    assert sql(path, "pragma integrity_check") == [("ok",)]
    assert sql(path, "pragma foreign_key_check") == []
    with closing(ReplayStore.open(path, read_only=True)) as store:
        assert store.verify().corrupt == {}


def updates(path: Path, last: int) -> list[list[tuple[Any, ...]]]:
    """Everything about them that does not tell the time."""
    draws = (
        "select iteration, slot, trajectory, state, staleness, drift_mean from draws where iteration <= ? order by 1, 2"
    )
    metrics = "select * from metrics where iteration <= ? order by run, iteration, name"
    rows = "select id, record_checksum from trajectories where iteration <= ? order by id"
    return [sql(path, query, last) for query in (draws, metrics, rows)]


def test_power_cut_loses_no_update_that_was_committed(disk: Path, tmp_path: Path) -> None:
    recording = record(disk, [sys.executable, "-m", "tests.soak.test_power_cut", str(disk / NAME)])
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
    small_log = f"pragma wal_autocheckpoint={PAGES}"
    sa.event.listen(sa.Pool, "connect", lambda connection, _: connection.execute(small_log))
    learn(Path(sys.argv[1]))
