from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from replay import DatabaseRefused, ReplayError, ReplayStore
from replay.sampling.samplers import make_sampler
from replay.storage.databases.open import parsed
from replay.storage.format.schema import OLDEST, REVISION, metadata
from tests.fakes.records import group, new_store, request, sql, task, trajectory
from tests.replay.storage.old_databases import REVISIONS, fill_old


def foreign(path: Path) -> Path:
    sql(path, "create table notes (id integer)")
    return path


def random_bytes(path: Path) -> Path:
    path.write_bytes(b"not a database, whatever its name says" * 100)
    return path


def newer(path: Path) -> Path:
    new_store(path).close()
    sql(path, "update replay_schema_version set version_num = '9999'")
    return path


def too_old(path: Path) -> Path:
    fill_old(path, OLDEST)
    sql(path, "update replay_schema_version set version_num = '0010'")
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (foreign, "must be one of agentloop's, got tables of something else"),
        (random_bytes, "must be a readable SQLite file, got 'file is not a database'"),
        (newer, f"must have schema {REVISION} or older, got 9999 .* Upgrade agentloop"),
        (too_old, f"must have schema {OLDEST} or newer, got 0010 .*, which can't be migrated"),
    ],
)
def test_database_of_something_else_is_refused_and_left_as_it_is(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    path = make(tmp_path / "some.db")
    before = path.read_bytes()
    attempts: list[Callable[[], ReplayStore]] = [
        lambda: ReplayStore.create(path),
        lambda: ReplayStore.open(path),
        lambda: ReplayStore.open(path, read_only=True),
    ]
    for attempt in attempts:
        with pytest.raises(DatabaseRefused, match=message):
            attempt()
    assert path.read_bytes() == before
    # A read-only look at a WAL database may leave its two empty side files.
    assert not any(side.stat().st_size for side in tmp_path.glob("some.db-wal"))


def test_older_schema_is_migrated_by_training_only(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    fill_old(path, OLDEST)
    with pytest.raises(DatabaseRefused, match=f"must have schema {REVISION}, got {OLDEST} .* agentloop replay migrate"):
        ReplayStore.open(path, read_only=True)


def facts(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of the tables that each schema has, but for the number of the schema."""
    tables = [name for (name,) in sql(path, "select name from sqlite_master where type = 'table'")]
    found = {name: sorted(sql(path, f"select * from {name}"), key=repr) for name in tables}
    return {name: rows for name, rows in found.items() if name not in ("replay_schema_version", "held_out")}


@pytest.mark.parametrize("revision", REVISIONS)
def test_every_earlier_schema_is_migrated_with_equal_rows(tmp_path: Path, revision: str) -> None:
    path = tmp_path / "replay.sqlite"
    fill_old(path, revision)
    before = facts(path)
    assert {name: len(rows) for name, rows in before.items() if rows} == {
        "runs": 1, "policies": 1, "tasks": 1, "groups": 2, "trajectories": 5, "segments": 5, "messages": 5, "draws": 2,
        "buffer_state": 2,
    }  # fmt: skip
    store = ReplayStore.create(path)
    assert facts(path) == before
    # What training migrates by itself is kept as it was.
    assert facts(path.with_name(f"replay.sqlite.schema-{revision}.backup")) == before
    # Tokens have the content hash that was stored with them, or would not be read.
    rows = store.read([id for (id,) in sql(path, "select id from trajectories")])
    assert [row.messages for row in rows] == [trajectory("a").messages] * 5
    assert len(store.draw(request(9, 99), make_sampler("uniform", 0))) == 5


def test_there_is_a_database_of_every_earlier_schema() -> None:
    assert [f"{n:04d}" for n in range(int(OLDEST), int(REVISION))] == REVISIONS


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


def test_create_again_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    new_store(path).append([task()], [group()], [trajectory("a")])
    assert ReplayStore.create(path).read(["a"])[0].id == "a"


@pytest.mark.parametrize("name", ["a folder/with space", "question?mark=1", "percent%20", "hash#tag", "ünïcode"])
def test_paths_may_hold_what_urls_may_not(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / "replay.sqlite"
    path.parent.mkdir(parents=True)
    new_store(path).close()
    assert path.is_file()
    ReplayStore.open(path, read_only=True).close()


def test_location_may_be_a_url(tmp_path: Path) -> None:
    assert parsed("sqlite:////data/replay.sqlite") == Path("/data/replay.sqlite")
    assert parsed("runs/x/replay.sqlite") == Path("runs/x/replay.sqlite")


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


def test_folder_that_is_missing_or_no_folder_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing" / "replay.sqlite", tmp_path / "file" / "replay.sqlite", tmp_path):
        with pytest.raises(DatabaseRefused, match="must be a writable file in an existing folder, got .* at") as error:
            ReplayStore.create(path)
        assert "\n" not in str(error.value)


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


def test_read_only_store_can_not_write(tmp_path: Path) -> None:
    new_store(tmp_path / "replay.sqlite").close()
    reader = ReplayStore.open(tmp_path / "replay.sqlite", read_only=True)
    with pytest.raises(ReplayError, match=r"must be intact and accessible, got 'attempt to write a readonly database'"):
        reader.append([task()], [group()], [])


def test_read_only_store_sees_what_a_writer_has_not_checkpointed(tmp_path: Path) -> None:
    store = new_store(tmp_path / "replay.sqlite")
    reader = ReplayStore.open(tmp_path / "replay.sqlite", read_only=True)
    store.append([task()], [group()], [trajectory("a")])
    assert reader.read(["a"])[0].id == "a"


def test_truncated_file_is_an_error_by_name(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    store = new_store(path)
    store.append([task()], [group()], [trajectory(f"t{i}") for i in range(20)])
    store.close()
    whole = path.read_bytes()
    for size in range(0, len(whole), 4096 * 3):
        path.write_bytes(whole[:size])
        with pytest.raises(ReplayError):
            damaged = ReplayStore.open(path, read_only=True)
            assert [row.id for row in damaged.read([f"t{i}" for i in range(20)])] == []


def described_indexes(inspector: sa.Inspector, table: str) -> list[object]:
    """The condition of one that holds a part of its table as a text."""
    indexes = inspector.get_indexes(table)
    return [{**index, "dialect_options": str([*map(str, index["dialect_options"].values())])} for index in indexes]


def test_migrations_give_exactly_the_declared_tables(tmp_path: Path) -> None:
    fill_old(tmp_path / "replay.sqlite", OLDEST)
    ReplayStore.create(tmp_path / "replay.sqlite").close()
    engine = sa.create_engine("sqlite://", creator=lambda: sqlite3.connect(tmp_path / "replay.sqlite"))
    inspector = sa.inspect(engine)
    plain = sa.create_engine("sqlite://")
    metadata.create_all(plain)
    assert set(inspector.get_table_names()) == {*metadata.tables, "replay_schema_version"}
    for name, table in metadata.tables.items():
        found = [(c["name"], c["nullable"], str(c["type"])) for c in inspector.get_columns(name)]
        declared = [(c.name, c.nullable, str(c.type.compile(engine.dialect))) for c in table.columns]
        assert found == declared
        assert inspector.get_pk_constraint(name)["constrained_columns"] == [c.name for c in table.primary_key]
        keys = {(*k["constrained_columns"], k["referred_table"]) for k in inspector.get_foreign_keys(name)}
        assert keys == {(k.parent.name, k.column.table.name) for k in table.foreign_keys}
        assert described_indexes(inspector, name) == described_indexes(sa.inspect(plain), name)
    plain.dispose()
    engine.dispose()


def test_new_database_is_what_a_migrated_one_is(tmp_path: Path) -> None:
    migrated, new = tmp_path / "migrated.sqlite", tmp_path / "new.sqlite"
    fill_old(migrated, OLDEST)
    for path in (migrated, new):
        ReplayStore.create(path).close()
    state = "select name from buffer_state order by name"
    assert sql(new, state) == sql(migrated, state)
    things = "select type, name from sqlite_master order by 1, 2"
    assert sql(new, things) == sql(migrated, things)
    for kind, name in sql(new, things):
        pragma = f"pragma {'table_xinfo' if kind == 'table' else 'index_xinfo'}('{name}')"
        # A column that a migration added stands last.
        assert sorted(row[1:] for row in sql(new, pragma)) == sorted(row[1:] for row in sql(migrated, pragma))


def test_creation_that_fails_leaves_an_empty_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "replay.sqlite"
    monkeypatch.setattr("replay.storage.databases.migrate.REVISION", None)
    with pytest.raises(sa.exc.IntegrityError, match="NOT NULL"):
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


def test_database_is_private_to_its_owner(tmp_path: Path) -> None:
    store = new_store(tmp_path / "replay.sqlite")
    store.append([task()], [group()], [trajectory("a")])
    for path in tmp_path.glob("replay.sqlite*"):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_database_writes_ahead_and_checks_references(tmp_path: Path) -> None:
    store = new_store(tmp_path / "replay.sqlite")
    with store.reading() as connection:
        settings = {
            name: connection.exec_driver_sql(f"pragma {name}").scalar() for name in ("journal_mode", "synchronous")
        }
        assert settings == {"journal_mode": "wal", "synchronous": 2}
        assert connection.exec_driver_sql("pragma foreign_keys").scalar() == 1


def ids(where: Path | ReplayStore) -> set[str]:
    return {row[0] for row in sql(where, "select id from trajectories")}


def test_a_link_leads_to_the_file_and_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    new_store(tmp_path / "disk" / "replay.sqlite").close()
    (tmp_path / "link.sqlite").symlink_to(tmp_path / "disk" / "replay.sqlite")
    monkeypatch.chdir(tmp_path)
    store = ReplayStore.open(Path("link.sqlite"))
    monkeypatch.chdir("/")
    store.append([task()], [group()], [trajectory("a")])
    store.close()
    assert ids(tmp_path / "disk" / "replay.sqlite") == {"a"}
