"""Connections to a SQLite file: how transactions begin in them, and what a commit waits for.

A write transaction begins with BEGIN IMMEDIATE. A deferred one that reads before it writes would lose updates or fail
with "database is locked", which no timeout mends.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import sqlalchemy as sa

from replay.storage.format.encoding import BlobError, decompress_text

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
    """Makes indexes anew that a row which was damaged in the file can't be found in, and goes on.

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
            _log.warning("database has rows that differ from its indexes, which are made anew: agentloop replay verify")
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
        # What is deleted is overwritten, also where the file can't be written anew behind it.
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
