"""A buffer in a file: what is opened, what is refused, and what stands on the disk."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import sqlalchemy as sa

from replay import DatabaseRefused, ReplayError, ReplayStore
from replay.storage.format.schema import REVISION, metadata
from tests.fakes.records import new_store, sql


def foreign(path: Path) -> None:
    sql(path, "create table notes (id integer)")


def random_bytes(path: Path) -> None:
    path.write_bytes(b"not a database, whatever its name says" * 100)


def of_schema(revision: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        new_store(path).close()
        sql(path, "update replay_schema_version set version_num = ?", revision)

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (foreign, "must be one of agentloop's, got tables of something else"),
        (random_bytes, "must be a readable SQLite file, got 'file is not a database'"),
        (of_schema("9999"), f"must have schema {REVISION}, got 9999 of a newer agentloop at .* Open it with the"),
        (of_schema("0012"), f"must have schema {REVISION}, got 0012 of an older agentloop at .* Open it with the"),
    ],
)
def test_database_of_something_else_is_refused_and_left_as_it_is(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "some.db"
    make(path)
    before = path.read_bytes()
    attempts: list[Callable[[], ReplayStore]] = [
        lambda: ReplayStore.create(path),
        lambda: ReplayStore.open(path),
        lambda: ReplayStore.open(path, read_only=True),
    ]
    for attempt in attempts:
        with pytest.raises(DatabaseRefused, match=message) as error:
            attempt()
        assert "\n" not in str(error.value)
    assert path.read_bytes() == before
    # A read-only look at a WAL database may leave its two empty side files.
    assert not any(side.stat().st_size for side in tmp_path.glob("some.db-wal"))


@pytest.mark.parametrize("read_only", [True, False])
def test_open_never_makes_a_database(tmp_path: Path, read_only: bool) -> None:
    with pytest.raises(DatabaseRefused, match="must be an existing file, got nothing at"):
        ReplayStore.open(tmp_path / "typo.sqlite", read_only=read_only)
    with pytest.raises(DatabaseRefused, match="must be an existing file, got a folder at"):
        ReplayStore.open(tmp_path, read_only=read_only)
    assert os.listdir(tmp_path) == []


def test_empty_file_is_no_database_to_open_and_one_to_create(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    path.touch()
    with pytest.raises(DatabaseRefused, match="got tables of something else or none"):
        ReplayStore.open(path)
    ReplayStore.create(path).close()
    ReplayStore.open(path).close()


@pytest.mark.parametrize("name", ["a folder/with space", "question?mark=1", "percent%20", "hash#tag", "ünïcode"])
def test_paths_may_hold_what_urls_may_not(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / "replay.sqlite"
    path.parent.mkdir(parents=True)
    new_store(path).close()
    assert path.is_file()
    ReplayStore.open(path, read_only=True).close()


@pytest.mark.parametrize(
    "url",
    [
        "mysql://me:secret@host/db",
        "sqlite://",
        "://x",
        "postgresql://me:sec@ret@host/db",
        "postgresql://host:secret/db",
    ],
)
def test_other_urls_are_refused_without_their_password(url: str) -> None:
    with pytest.raises(DatabaseRefused) as error:
        ReplayStore.create(url)
    assert "secret" not in str(error.value)


def as_nobody() -> None:
    """Root may write everywhere."""
    if os.geteuid() == 0:
        os.setuid(65534)


def refusal(path: Path) -> list[str]:
    messages = []
    for attempt in (ReplayStore.create, ReplayStore.open):
        with pytest.raises(DatabaseRefused) as error:
            attempt(path)
        messages.append(str(error.value))
    return messages


def test_folder_without_permission_is_told_in_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with ProcessPoolExecutor(1, mp_context=get_context("fork"), initializer=as_nobody) as pool:
        created, opened = pool.submit(refusal, tmp_path / "replay.sqlite").result()
    assert created.startswith("database must be a writable file in an existing folder, got Permission denied at")
    assert opened.startswith("database must be an existing file, got nothing at")


def test_tables_are_the_declared_ones(tmp_path: Path) -> None:
    ReplayStore.create(tmp_path / "replay.sqlite").close()
    engine = sa.create_engine("sqlite://", creator=lambda: sqlite3.connect(tmp_path / "replay.sqlite"))
    inspector = sa.inspect(engine)
    assert set(inspector.get_table_names()) == {*metadata.tables, "replay_schema_version"}
    for name, table in metadata.tables.items():
        found = [(c["name"], c["nullable"], str(c["type"])) for c in inspector.get_columns(name)]
        assert found == [(c.name, c.nullable, str(c.type.compile(engine.dialect))) for c in table.columns]
    engine.dispose()


def test_creation_that_fails_leaves_an_empty_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "replay.sqlite"
    monkeypatch.setattr("replay.storage.databases.database.REVISION", None)
    with pytest.raises(ReplayError):
        ReplayStore.create(path)
    assert sql(path, "select count(*) from sqlite_master") == [(0,)]
    monkeypatch.undo()
    ReplayStore.create(path).close()


def test_file_made_by_create_is_private_from_its_first_byte(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        ReplayStore.create(tmp_path / "replay.sqlite")
    finally:
        os.umask(old)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_database_writes_ahead_and_checks_references(tmp_path: Path) -> None:
    store = new_store(tmp_path / "replay.sqlite")
    with store.reading() as connection:
        settings = {
            name: connection.exec_driver_sql(f"pragma {name}").scalar() for name in ("journal_mode", "synchronous")
        }
        assert settings == {"journal_mode": "wal", "synchronous": 2}
        assert connection.exec_driver_sql("pragma foreign_keys").scalar() == 1
