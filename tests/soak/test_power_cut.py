"""Power cuts at random moments, on disks that keep of unflushed writes what they like."""

from __future__ import annotations

import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from replay.storage.databases.backup import backup_path

from replay import ReplayStore
from replay.sampling.samplers import make_sampler
from replay.storage.format.schema import OLDEST
from tests.fakes.records import RUN, iterate, policy, run_record, sql, trajectory
from tests.replay.storage.old_databases import fill_old
from tests.replay.storage.test_kill_points import Contents, columns_and_rows
from tests.replay.storage.writers import begin, check_whole, stored_ids
from tests.soak.power_cut_writers import EACH, ITERATIONS, ROUNDS, WRITERS
from tests.soak.recorded_disk import STRACE, Recording, images, record

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(STRACE is None, reason="writes are recorded by strace, which is not installed"),
]

IMAGES = 200
"""Of each of appending, learning and either migration."""
NAME = "replay.sqlite"


def recorded(folder: Path, work: str) -> Recording:
    return record(folder, [sys.executable, "-m", "tests.soak.power_cut_writers", work, str(folder / NAME)])


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


def leave_as_written(path: Path) -> None:
    fill_old(path, OLDEST)


def leave_log(path: Path) -> None:
    """As a trainer that was killed leaves it: with half of its rows in the log."""
    fill_old(path, OLDEST)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma journal_mode=wal")
        connection.execute("update trajectories set state_reason = 'left in the log'")
        log = path.with_name(f"{NAME}-wal").read_bytes()
        file = path.read_bytes()
    path.write_bytes(file)
    path.with_name(f"{NAME}-wal").write_bytes(log)


@pytest.mark.parametrize("make", [leave_as_written, leave_log])
def test_power_cut_in_a_migration_leaves_the_old_schema_or_the_new_with_its_copy(
    disk: Path, tmp_path: Path, make: object
) -> None:
    assert callable(make)
    make(disk / NAME)
    shutil.copytree(disk, tmp_path / "before")
    old = columns_and_rows(tmp_path / "before" / NAME)
    recording = recorded(disk, "migrate")
    assert [line for _, line in recording.said] == ["migrated"]
    new = columns_and_rows(disk / NAME)
    found: list[Contents] = []

    def check(path: Path, told: list[str]) -> None:
        found.append(columns_and_rows(path))
        assert found[-1] == new or (found[-1] == old and not told)
        backup = backup_path(path, OLDEST)
        if found[-1] == new:
            assert columns_and_rows(backup) == old
        ReplayStore.create(path).close()
        assert (columns_and_rows(path), columns_and_rows(backup)) == (new, old)
        assert sorted(file.name for file in path.parent.iterdir()) == [NAME, backup.name]

    print(len(recording.stretches), "flushes", images(recording, tmp_path, IMAGES, check, name=NAME))
    print(sum(contents == new for contents in found), "migrated")
