"""An older database opened by several processes at once, killed, or without room: the old one or the new."""

from __future__ import annotations

import resource
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import sqlalchemy as sa

from replay import DatabaseRefused, ReplayError, ReplayStore
from replay.storage.databases import Location
from replay.storage.databases.backup import backup_path
from replay.storage.format.schema import OLDEST, REVISION
from tests.fakes.databases import SQLITE, Databases
from tests.fakes.records import run_record, sql
from tests.fakes.small_processes import SMALL
from tests.replay.storage.old_databases import fill_old
from tests.replay.storage.test_kill_points import columns_and_rows
from tests.replay.storage.test_machine import in_child


@dataclass(frozen=True)
class Opened:
    """How a process did."""

    migrated: bool
    refusal: str | None


def open_at_once(location: Location, processes: int) -> list[Opened]:
    barrier = SMALL.Barrier(processes)
    running = []
    for _ in range(processes):
        receiving, sending = SMALL.Pipe(duplex=False)
        child = SMALL.Process(target=_open, args=(location, barrier, sending))
        child.start()
        sending.close()
        running.append((child, receiving))
    outcomes = []
    for child, receiving in running:
        while not receiving.poll(0.1):
            look(location)
        outcomes.append(receiving.recv())
        receiving.close()
        child.join()
    return outcomes


def look(location: Location) -> None:
    """As somebody who comes by meanwhile: the newest schema, or told that it is none yet."""
    try:
        with closing(ReplayStore.open(location, read_only=True)) as store, store.reading() as connection:
            assert connection.exec_driver_sql("select version_num from replay_schema_version").scalar() == REVISION
    except DatabaseRefused as error:
        assert any(found in str(error) for found in (f"got {OLDEST}", "got nothing", "something else or none")), error


def _open(location: Location, barrier: Barrier, sending: Connection) -> None:
    migrated, refusal = False, None

    def watch(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        nonlocal migrated
        if statement.lower().startswith(("insert into replay_schema_version", "update replay_schema_version")):
            migrated = True

    sa.event.listen(sa.Engine, "after_cursor_execute", watch)
    barrier.wait(60)
    try:
        with closing(ReplayStore.create(location)) as store:
            store.add_run(run_record())
    except ReplayError as error:
        refusal = str(error)
    sending.send(Opened(migrated, refusal))


def leave_as_written(location: Location) -> None:
    fill_old(location, OLDEST)


def write_ahead(location: Location) -> None:
    """As an agentloop of that schema leaves a file."""
    fill_old(location, OLDEST)
    if isinstance(location, Path):
        sql(location, "pragma journal_mode=wal")


def leave_empty(location: Location) -> None:
    """Nothing is there, or a server's database without a table."""


def touch(location: Location) -> None:
    assert isinstance(location, Path)
    location.touch()


def check_at_once(
    databases: Databases, folder: Path, make: Callable[[Location], None], *, processes: int, rounds: int
) -> None:
    is_old = make in (leave_as_written, write_ahead)
    for number in range(rounds):
        (folder / str(number)).mkdir()
        location = databases.new(folder / str(number) / "replay.sqlite", empty=True)
        make(location)
        before = columns_and_rows(location) if is_old else {}
        outcomes = open_at_once(location, processes)
        assert [each.refusal for each in outcomes] == [None] * processes, f"round {number}"
        assert sum(each.migrated for each in outcomes) == 1, f"round {number}"
        assert sql(location, "select version_num from replay_schema_version") == [(REVISION,)]
        if isinstance(location, Path):
            backup = backup_path(location, OLDEST)
            files = {location.name, backup.name} if is_old else {location.name}
            assert {file.name for file in location.parent.iterdir()} == files
            assert (columns_and_rows(backup) if is_old else {}) == before, f"round {number}"
            assert sql(location, "pragma journal_mode") == [("wal",)]
            assert sql(location, "pragma integrity_check") == [("ok",)]
    databases.drop_all()


def test_one_of_three_processes_migrates(databases: Databases, tmp_path: Path) -> None:
    make, rounds = (write_ahead, 2) if databases.is_sqlite else (leave_empty, 1)
    check_at_once(databases, tmp_path, make, processes=3, rounds=rounds)


@pytest.mark.soak
@pytest.mark.every_server
@pytest.mark.parametrize("processes", [2, 3, 8])
@pytest.mark.parametrize("make", [leave_as_written, leave_empty])
def test_one_of_many_processes_migrates(
    databases: Databases, tmp_path: Path, make: Callable[[Location], None], processes: int
) -> None:
    check_at_once(databases, tmp_path, make, processes=processes, rounds=50)


@pytest.mark.soak
@pytest.mark.parametrize("processes", [2, 3, 8])
@pytest.mark.parametrize("make", [write_ahead, touch])
def test_one_of_many_processes_migrates_a_file(
    tmp_path: Path, make: Callable[[Location], None], processes: int
) -> None:
    check_at_once(Databases(SQLITE), tmp_path, make, processes=processes, rounds=50)


def killed_in_its_commit(path: Path, made: Path) -> Path:
    """A file as it was, with half of a transaction in it and the journal that undoes it."""
    made.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma cache_size=2")
        connection.execute("begin immediate")
        connection.execute("update messages set said = randomblob(40000)")
        for side in ("", "-journal"):
            shutil.copy(f"{path}{side}", made)
        connection.execute("rollback")
    return made / path.name


def test_migration_killed_in_its_commit_is_undone_and_done_again(tmp_path: Path) -> None:
    leave_as_written(tmp_path / "replay.sqlite")
    path = killed_in_its_commit(tmp_path / "replay.sqlite", tmp_path / "killed")
    assert path.read_bytes() != (tmp_path / "replay.sqlite").read_bytes()
    with closing(ReplayStore.create(path)) as store:
        assert len(store.read([id for (id,) in sql(path, "select id from trajectories")])) == 5
    assert columns_and_rows(backup_path(path, OLDEST)) == columns_and_rows(tmp_path / "replay.sqlite")


def test_unfinished_copy_of_a_killed_migration_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    write_ahead(path)
    before = columns_and_rows(path)
    for stale in (backup_path(path, OLDEST), tmp_path / f"{backup_path(path, OLDEST).name}.unfinished"):
        stale.write_bytes(b"half of it")
    ReplayStore.create(path).close()
    assert columns_and_rows(backup_path(path, OLDEST)) == before
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, backup_path(path, OLDEST).name]


def refusal_within(limit: int, path: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.raises(DatabaseRefused) as error:
        ReplayStore.create(path)
    return str(error.value)


@pytest.mark.parametrize("make", [leave_as_written, write_ahead])
def test_migration_without_room_for_the_copy_changes_nothing(tmp_path: Path, make: Callable[[Location], None]) -> None:
    path = tmp_path / "replay.sqlite"
    make(path)
    before = path.read_bytes()
    told = in_child(refusal_within, len(before) // 2, path)
    assert told.startswith("database must be copied before it is migrated, got disk I/O error at ")
    assert told.endswith("Make room beside it.")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
