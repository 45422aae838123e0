import hashlib
import os
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from replay import DatabaseRefused, ReplayStore
from replay.storage.databases import Location
from replay.storage.format.schema import REVISION, metadata
from tests.fakes.databases import Databases
from tests.fakes.records import new_store, sql


def test_every_change_of_tables_raises_the_revision() -> None:
    """Rows' checksums cover their columns: without a new number, rows of an earlier agentloop would look damaged."""
    columns = [(table.name, column.name, str(column.type)) for table in metadata.sorted_tables for column in table.c]
    digest = hashlib.sha256(repr(columns).encode()).hexdigest()
    assert (REVISION, digest[:12]) == ("0023", "b1fb2b14e721")


def foreign(location: Location) -> None:
    sql(location, "create table notes (id integer)")


def random_bytes(location: Location) -> None:
    if not isinstance(location, Path):
        pytest.skip("a server's files are its own")
    location.write_bytes(b"not a database, whatever its name says" * 100)


def of_schema(revision: str) -> Callable[[Location], None]:
    def make(location: Location) -> None:
        new_store(location).close()
        sql(location, "update replay_schema_version set version_num = ?", revision)

    return make


def contents(location: Location) -> object:
    if isinstance(location, Path):
        return location.read_bytes()
    names = sql(location, "select tablename from pg_tables where schemaname = 'public' order by 1")
    return {name: sorted(sql(location, f"select * from {name}"), key=repr) for (name,) in names}


@pytest.mark.every_database
@pytest.mark.every_server
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
    databases: Databases, tmp_path: Path, make: Callable[[Location], None], message: str
) -> None:
    location = databases.new(tmp_path / "some.db", empty=True)
    make(location)
    before = contents(location)
    for attempt in (ReplayStore.create, ReplayStore.open, lambda place: ReplayStore.open(place, read_only=True)):
        with pytest.raises(DatabaseRefused, match=message) as error:
            attempt(location)
        assert "\n" not in str(error.value)
    assert contents(location) == before
    # A read-only look at a WAL database may leave its two empty side files.
    assert not any(side.stat().st_size for side in tmp_path.glob("some.db-wal"))


@pytest.mark.parametrize("read_only", [True, False])
def test_open_never_makes_a_database(tmp_path: Path, read_only: bool) -> None:
    with pytest.raises(DatabaseRefused, match="must be an existing file, got nothing at"):
        ReplayStore.open(tmp_path / "typo.sqlite", read_only=read_only)
    with pytest.raises(DatabaseRefused, match="must be an existing file, got a folder at"):
        ReplayStore.open(tmp_path, read_only=read_only)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "url", ["mysql://me:secret@h/db", "sqlite://", "://x", "postgresql://me:sec@ret@h/db", "postgresql://h:secret/db"]
)
def test_other_urls_are_refused_without_their_password(url: str) -> None:
    with pytest.raises(DatabaseRefused) as error:
        ReplayStore.create(url)
    assert "secret" not in str(error.value)


def test_file_made_by_create_is_private_from_its_first_byte(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        ReplayStore.create(tmp_path / "replay.sqlite")
    finally:
        os.umask(old)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_commit_that_returned_is_on_the_disk(tmp_path: Path) -> None:
    """What SQLite promises with these settings, a power cut included."""
    with closing(new_store(tmp_path / "replay.sqlite")) as store, store.reading() as connection:
        names = ("journal_mode", "synchronous", "foreign_keys")
        settings = [connection.exec_driver_sql(f"pragma {name}").scalar() for name in names]
    assert settings == ["wal", 2, 1]
