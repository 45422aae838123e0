"""A buffer in a file: everything that is special about SQLite. A write transaction begins with BEGIN IMMEDIATE: a
deferred one that reads first would fail with "database is locked", however long it waits."""

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import sqlalchemy as sa
from sqlalchemy import exc

from replay.errors import DatabaseFailed, DatabaseRefused, ReplayError
from replay.storage.databases.database import Database, Result, check_revision, create_tables, stored_revision
from replay.storage.databases.disk import network_file_system
from replay.storage.format.encoding import BlobError, decompress_text
from replay.storage.format.views import create_views

# The system caches the file's pages once for all connections; a cache of each connection holds them twice.
_READERS_CACHE_KIB = 500
# SQLite has no queue of writers: with dozens of them on a busy machine, one has waited for half a minute.
_BUSY_MILLISECONDS = 120_000
BEGIN = "replay_begin"
"""The execution option for the statement that begins a transaction, if it is not the engine's own."""

OpenMode = Literal["ro", "rw", "plain"]
"""ro: read only; rw: for writing; plain: for writing, with the journal the file has."""


def engine_for(path: Path, mode: OpenMode) -> sa.Engine:
    uri = f"{path.absolute().as_uri()}?mode={'ro' if mode == 'ro' else 'rw'}"

    def connect() -> sqlite3.Connection:
        # isolation_level=None: the driver begins no transactions of its own; `_begin` does.
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        try:
            _prepare(connection, mode)
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    engine = sa.create_engine("sqlite+pysqlite://", creator=connect, poolclass=sa.QueuePool)
    begin = "BEGIN" if mode == "ro" else "BEGIN IMMEDIATE"

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get(BEGIN, begin))

    return engine


def _prepare(connection: sqlite3.Connection, mode: OpenMode) -> None:
    connection.execute(f"PRAGMA busy_timeout={_BUSY_MILLISECONDS}")
    connection.execute("PRAGMA foreign_keys=ON")
    # Bytes that are not UTF-8 are read as a text that was never written, so that checksums find them.
    connection.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
    connection.create_function("plain_text", 1, _plain_text, deterministic=True)
    if mode == "ro":
        connection.execute("PRAGMA query_only=ON")
        connection.execute(f"PRAGMA cache_size=-{_READERS_CACHE_KIB}")
    if mode == "rw":
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous=FULL")
        # Deleted content is overwritten, even if the file can't be rewritten later.
        connection.execute("PRAGMA secure_delete=ON")


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch the file to a write-ahead log. If two connections do so at once, SQLite refuses one of them, which tries
    again."""
    deadline = time.monotonic() + _BUSY_MILLISECONDS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _plain_text(frame: bytes) -> str | None:
    """The text of a conversation for searches; None if it is damaged. Reads of the row and `verify` name the damage."""
    try:
        return decompress_text(frame)
    except BlobError:
        return None


class SqliteDatabase(Database):
    """A database in a file. A commit that returned is on the disk: SQLite waits for the disk (synchronous=FULL)."""

    path: Path
    compresses_text = True

    def __init__(self, path: Path, *, mode: OpenMode) -> None:
        self.path = path
        self.url = str(path)
        self.read_only = mode == "ro"
        self._engine = engine_for(path, mode)
        self._snapshots = self._engine.execution_options(**{BEGIN: "BEGIN"})

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        with self._explained(), self._engine.begin() as connection:
            yield connection

    locking_rows = writing

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        with self._explained(), self._snapshots.begin() as connection:
            yield connection

    def erase(self, work: Callable[[sa.Connection], Result]) -> Result:
        answer = self.write(work)
        with self._explained(), self._engine.connect() as connection:
            raw = connection.connection.driver_connection
            assert raw is not None
            try:
                raw.execute("VACUUM")
                # The log holds the old content too, until it is emptied.
                is_busy = raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            except sqlite3.DatabaseError as error:
                raise self._not_rewritten(*_cause(error)) from error
        if is_busy:
            raise self._not_rewritten("readers of its log", _REMEDIES[sqlite3.SQLITE_BUSY])
        return answer

    def damage(self, connection: sa.Connection) -> list[str]:
        # The quick check does not compare indexes with rows, but lists are read from an index.
        found = connection.exec_driver_sql("PRAGMA integrity_check(20)").scalars().all()
        return [str(line) for line in found if line != "ok"]

    def size(self, connection: sa.Connection) -> int:
        # The file's own size lacks the pages that are still in its log.
        names = ("page_count", "page_size")
        pages, bytes = (connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in names)
        return int(pages) * int(bytes)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn failures of the machine into one-line errors; wrong statements stay what they are."""
        with self.naming_damage():
            try:
                yield
            except exc.DatabaseError as error:
                if type(error) not in (exc.OperationalError, exc.DatabaseError):
                    raise
                # The commit is in the log, and may or may not be on the disk.
                is_unsure = getattr(error.orig, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_FSYNC
                outcome = "Nothing of the transaction was stored"
                if is_unsure:
                    outcome = "Whether the transaction was stored is not known"
                found, remedy = _cause(error)
                raise DatabaseFailed(
                    f"database must be intact and accessible, got {found!r} at {self.path}{_room(self.path)}. "
                    f"{outcome}; what was stored before is safe. {remedy}"
                ) from error

    def _not_rewritten(self, found: str, remedy: str) -> ReplayError:
        return ReplayError(
            f"database must be free and have room to be rewritten, got {found!r} at {self.path}{_room(self.path)}. "
            f"Deleted content is gone for every reader. Run this again to remove its bytes. {remedy}"
        )


_REMEDIES = {
    sqlite3.SQLITE_FULL: "Make room on its disk and run this again; a run continues with --resume.",
    sqlite3.SQLITE_IOERR: "Look for a failing disk, or a limit on the size of files (ulimit -f).",
    sqlite3.SQLITE_CORRUPT: "Put a copy in its place, or export what can still be read: agentloop replay export",
    sqlite3.SQLITE_NOTADB: "Put a copy in its place.",
    sqlite3.SQLITE_READONLY: "Become a user who may write the file and its folder; to read it, copy it elsewhere.",
    sqlite3.SQLITE_BUSY: "Stop the program that has been using it all this time.",
    sqlite3.SQLITE_CANTOPEN: "Check its permissions and the limit on open files (ulimit -n), or copy it elsewhere.",
}


def _cause(error: Exception) -> tuple[str, str]:
    """SQLite's message, and what to do about it."""
    found = error.orig if isinstance(error, exc.DBAPIError) else error
    # The low byte of SQLite's code is the kind of error; the rest says where it happened.
    kind = int(getattr(found, "sqlite_errorcode", 0)) & 0xFF
    return str(found), _REMEDIES.get(kind, "Check the file and its folder.")


def _room(path: Path) -> str:
    try:
        return f" ({shutil.disk_usage(path.parent).free} bytes free)"
    except OSError:
        # The folder is gone, or can't be entered any more.
        return ""


def create(path: Path) -> SqliteDatabase:
    # In a folder that can't be entered, os.path answers no, and pathlib raises.
    _check_local(path)
    if os.path.isfile(path) and path.stat().st_size:
        _check_revision(path, writes=True, creates=True)
    try:
        # Nobody else may read the file; SQLite gives its side files the same mode. An existing file is not opened here:
        # closing it would release this process's locks on it.
        if not os.path.isfile(path):
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise DatabaseRefused(
            f"database must be a writable file in an existing folder, got {error.strerror} at {path}. "
            "Choose another folder."
        ) from error
    database = SqliteDatabase(path, mode="rw")
    with database.writing() as connection:
        if stored_revision(connection) is None:
            create_tables(connection)
            create_views(connection)
    return database


def _check_local(path: Path) -> None:
    """Raises DatabaseRefused for a file on a network file system: a write-ahead log needs shared memory, and writers on
    several machines would damage the file."""
    found = network_file_system(Path(os.path.realpath(path)).parent)
    if found is not None:
        raise DatabaseRefused(
            f"database must be on a local disk to be written to, got {found} at {path}. Keep it on a PostgreSQL server "
            "(replay.database: postgresql+psycopg://USER@HOST/NAME), or run.folder on a local disk."
        )


def open_existing(path: Path, *, read_only: bool) -> SqliteDatabase:
    if not os.path.isfile(path):
        found = "a folder" if os.path.isdir(path) else "nothing"
        raise DatabaseRefused(f"database must be an existing file, got {found} at {path}. Check the path.")
    if not read_only:
        _check_local(path)
    _check_revision(path, writes=not read_only)
    return SqliteDatabase(path, mode="ro" if read_only else "rw")


def _check_revision(path: Path, *, writes: bool, creates: bool = False) -> None:
    """Raises DatabaseRefused for another program's file before anything changes it: even the switch to a write-ahead
    log rewrites a file's header."""
    try:
        try:
            revision = _revision(path, "ro")
        except exc.OperationalError as error:
            # If a process was killed while it created the file, only a writer can roll that back.
            if not writes or getattr(error.orig, "sqlite_errorcode", 0) != sqlite3.SQLITE_READONLY_ROLLBACK:
                raise
            revision = _revision(path, "plain")
    except (exc.DatabaseError, UnicodeDecodeError) as error:  # SQLite's message repeats a damaged schema
        found, remedy = _cause(error)
        raise DatabaseRefused(f"database must be a readable SQLite file, got {found!r} at {path}. {remedy}") from error
    check_revision(revision, str(path), creates=creates)


def _revision(path: Path, mode: OpenMode) -> str | None:
    engine = engine_for(path, mode)
    try:
        with engine.begin() as connection:
            return stored_revision(connection)
    finally:
        engine.dispose()
