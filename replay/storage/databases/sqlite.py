"""A buffer in a file: every SQLite particular of the project. A write transaction begins with BEGIN IMMEDIATE: a
deferred one that reads first would lose updates or fail with "database is locked", which no timeout mends."""

import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import sqlalchemy as sa
from sqlalchemy import exc

from replay.errors import DatabaseFailed, DatabaseRefused, ReplayError
from replay.storage.databases.database import Database, Result, check_revision, create_tables, stored_revision
from replay.storage.databases.disk import network_file_system
from replay.storage.format.encoding import BlobError, decompress_text
from replay.storage.format.views import create_views

_log = logging.getLogger(__name__)

# The system keeps the file's pages once for all; what each connection keeps of them is memory twice.
_READERS_CACHE_KIB = 500
# SQLite keeps no queue: with dozens of writers on a busy machine, one of them has waited for half a minute.
_BUSY_MILLISECONDS = 120_000
BEGIN = "replay_begin"
"""The execution option that names another statement than the engine's own to begin a transaction."""

OpenMode = Literal["ro", "immutable", "rw", "plain"]
"""A file is looked at, also where side files can't be made; written to; or opened with whatever journal it has."""
LOOKING = ("ro", "immutable")
"""The modes in which nothing is written."""
_OPTIONS = {"ro": "mode=ro", "immutable": "mode=ro&immutable=1", "rw": "mode=rw", "plain": "mode=rw"}


class _Cursor(sqlite3.Cursor):
    """Builds indexes again where a row that was damaged in the file can't be found in them, and goes on.

    A change of a row takes its entry out of the index. Where a bit of the row has flipped there is no such entry, and
    SQLite refuses: the row could not even be quarantined. Its checksum finds what is wrong with the row itself.
    """

    def execute(self, sql: str, parameters: Any = (), /) -> Self:
        try:
            return super().execute(sql, parameters)
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0)
            if code != sqlite3.SQLITE_CORRUPT_INDEX or not self.connection.in_transaction:
                raise
            _log.warning(
                "database has rows that differ from its indexes, which are made again: agentloop replay verify"
            )
        super().execute("REINDEX")
        return super().execute(sql, parameters)


class _Connection(sqlite3.Connection):
    def cursor(self, factory: Any = _Cursor) -> Any:
        return super().cursor(factory)


def engine_for(path: Path, mode: OpenMode) -> sa.Engine:
    uri = f"{path.absolute().as_uri()}?{_OPTIONS[mode]}"

    def connect() -> sqlite3.Connection:
        # isolation_level=None: the driver begins no transactions of its own; `_begin` does.
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, factory=_Connection)
        try:
            _prepare(connection, mode)
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    engine = sa.create_engine("sqlite+pysqlite://", creator=connect, poolclass=sa.QueuePool)
    begin = "BEGIN" if mode in LOOKING else "BEGIN IMMEDIATE"

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get(BEGIN, begin))

    return engine


def _prepare(connection: sqlite3.Connection, mode: OpenMode) -> None:
    connection.execute(f"PRAGMA busy_timeout={_BUSY_MILLISECONDS}")
    connection.execute("PRAGMA foreign_keys=ON")
    # Bytes that are no UTF-8 are another text than any that was written: checksums find them.
    connection.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
    connection.create_function("plain_text", 1, _plain_text, deterministic=True)
    if mode in LOOKING:
        connection.execute("PRAGMA query_only=ON")
        connection.execute(f"PRAGMA cache_size=-{_READERS_CACHE_KIB}")
    if mode == "rw":
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous=FULL")
        # What is deleted is overwritten, also where the file can't be written again after it.
        connection.execute("PRAGMA secure_delete=ON")


def _write_ahead(connection: sqlite3.Connection) -> None:
    """SQLite refuses one of two that change the file's mode at once, however long it may wait."""
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
    """For searches: a damaged conversation says nothing. Reading it, and `verify`, name the damage."""
    try:
        return decompress_text(frame)
    except BlobError:
        return None


class SqliteDatabase(Database):
    """A file. A commit that returned is on the disk: SQLite waits for it (synchronous=FULL) while it has the lock."""

    path: Path
    compresses_text = True

    def __init__(self, path: Path, *, mode: OpenMode) -> None:
        self.path = path
        self.url = str(path)
        self.read_only = mode in LOOKING
        self._engine = engine_for(path, mode)
        self._snapshots = self._engine.execution_options(**{BEGIN: "BEGIN"})

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        with self._explained(), self._engine.begin() as connection:
            yield connection

    locking_rows = writing

    def one_statement(self) -> AbstractContextManager[sa.Connection]:
        # Its deferred transaction begins with the statement, and takes the lock that this needs.
        return self.reading()

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
                # What stood there before also stands in the log, until the log is emptied.
                is_busy = raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            except sqlite3.DatabaseError as error:
                raise self._not_rewritten(*_cause(error)) from error
        if is_busy:
            raise self._not_rewritten("readers of its log", _REMEDIES[sqlite3.SQLITE_BUSY])
        return answer

    def damage(self, connection: sa.Connection) -> list[str]:
        # Not the quick one, which does not compare an index with the rows it is of: lists are read off an index.
        found = connection.exec_driver_sql("PRAGMA integrity_check(20)").scalars().all()
        return [str(line) for line in found if line != "ok"]

    def size(self, connection: sa.Connection) -> int:
        # The file alone lacks what still stands in its log.
        pages, bytes = (connection.exec_driver_sql(f"PRAGMA {of}").scalar_one() for of in ("page_count", "page_size"))
        return int(pages) * int(bytes)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """The machine's failures in one line; statements that are wrong in themselves stay what they are."""
        with self.naming_damage():
            try:
                yield
            except exc.DatabaseError as error:
                if type(error) not in (exc.OperationalError, exc.DatabaseError):
                    raise
                # It is written where others would find it after a crash, and may or may not be on the disk.
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
            f"What was deleted is gone for every reader; its bytes go when this is run again. {remedy}"
        )


_REMEDIES = {
    sqlite3.SQLITE_FULL: "Make room on its disk and run this again; a run goes on with --resume.",
    sqlite3.SQLITE_IOERR: "Look for a failing disk, or a limit on the size of files (ulimit -f).",
    sqlite3.SQLITE_CORRUPT: "Put a copy in its place, or export what can still be read: agentloop replay export",
    sqlite3.SQLITE_NOTADB: "Put a copy in its place.",
    sqlite3.SQLITE_READONLY: "Become a user who may write it and in its folder; to look, copy it elsewhere.",
    sqlite3.SQLITE_BUSY: "Stop what has been using it all this time.",
    sqlite3.SQLITE_CANTOPEN: "Check its folder, who may write there, and the limit on open files (ulimit -n).",
}


def _cause(error: Exception) -> tuple[str, str]:
    """What SQLite found, and what to do about it."""
    found = error.orig if isinstance(error, exc.DBAPIError) else error
    # The low byte of SQLite's code; the rest says where it happened.
    kind = int(getattr(found, "sqlite_errorcode", 0)) & 0xFF
    return str(found), _REMEDIES.get(kind, "Check the file and its folder.")


def _room(path: Path) -> str:
    try:
        return f" ({shutil.disk_usage(path.parent).free} bytes free)"
    except OSError:
        # The folder has gone, or can't be entered any more.
        return ""


def create(path: Path) -> SqliteDatabase:
    # os.path answers no where pathlib raises: in a folder that can't be entered.
    _check_local(path)
    if os.path.isfile(path) and path.stat().st_size:
        _check_revision(path, writes=True, creates=True)
    try:
        # Nobody else may read what agents said and saw. SQLite gives its side files the same mode. One that is there is
        # not opened: to close it would take this process's locks on it away.
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
    """A write-ahead log needs memory that all its users share: over a network, writers would damage the file."""
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
    mode = _check_revision(path, writes=not read_only)
    return SqliteDatabase(path, mode=mode if read_only else "rw")


def _check_revision(path: Path, *, writes: bool, creates: bool = False) -> OpenMode:
    """The mode that the file can be looked at in. Refuses what is not ours before anything could change it: even
    switching to WAL rewrites a file's header."""
    mode: OpenMode = "ro"
    try:
        try:
            revision = _revision(path, mode)
        except exc.OperationalError as error:
            mode = _other_mode(path, error, writes=writes)
            revision = _revision(path, mode)
    except (exc.DatabaseError, UnicodeDecodeError) as error:  # SQLite repeats what stands in a damaged schema
        found, remedy = _cause(error)
        raise DatabaseRefused(f"database must be a readable SQLite file, got {found!r} at {path}. {remedy}") from error
    check_revision(revision, str(path), creates=creates)
    return mode


def _revision(path: Path, mode: OpenMode) -> str | None:
    engine = engine_for(path, mode)
    try:
        with engine.begin() as connection:
            return stored_revision(connection)
    finally:
        engine.dispose()


def _other_mode(path: Path, error: exc.OperationalError, *, writes: bool) -> OpenMode:
    """How to look at a file that the ordinary way fails for; raises the error where there is no other. Only who writes
    can undo what was killed while it made the file. In a folder where nobody can write, SQLite can't make its side
    files, and needs none where all is in the file itself."""
    if writes and getattr(error.orig, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_ROLLBACK:
        return "plain"
    whole = os.path.realpath(path)
    sides = [Path(f"{whole}{side}") for side in ("-wal", "-journal")]
    has_log = any(side.is_file() and side.stat().st_size for side in sides)
    if writes or os.access(os.path.dirname(whole), os.W_OK) or has_log:
        raise error
    return "immutable"
