"""A buffer in a file: every SQLite particular of the project stands here.

A write transaction begins with BEGIN IMMEDIATE. A deferred one that reads before it writes would lose updates or fail
with "database is locked", which no timeout mends.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import sqlalchemy as sa
from sqlalchemy import exc

from replay.databases.base import Database
from replay.databases.revision import check_revision, migrate, stored_revision
from replay.errors import DatabaseRefused, ReplayError
from replay.schema import REVISION

_BUSY_MILLISECONDS = 30_000
_BEGIN = "replay_begin"

Mode = Literal["ro", "rw"]


class SqliteDatabase(Database):
    """A file. A durable commit takes one fsync."""

    path: Path

    def __init__(self, path: Path, *, mode: Mode) -> None:
        self.path = path
        self.url = str(path)
        self.read_only = mode == "ro"
        self._engine = _engine(path, mode)
        self._snapshots = self._engine.execution_options(**{_BEGIN: ("BEGIN",)})
        self._hasty = self._engine.execution_options(**{_BEGIN: ("PRAGMA synchronous=NORMAL", "BEGIN IMMEDIATE")})

    @contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[sa.Connection]:
        with self._explained(), (self._engine if durable else self._hasty).begin() as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        with self._explained(), self._snapshots.begin() as connection:
            yield connection

    def size(self, connection: sa.Connection) -> int:
        return self.path.stat().st_size

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """The machine's failures in one line; statements that are wrong in themselves stay what they are."""
        try:
            yield
        except exc.DatabaseError as error:
            if type(error) not in (exc.OperationalError, exc.DatabaseError):
                raise
            free = shutil.disk_usage(self.path.parent).free
            raise ReplayError(
                f"database must be intact and accessible, got {str(error.orig)!r} at {self.path} ({free} bytes free). "
                "Nothing of the transaction was stored; what was stored before is safe."
            ) from error


def create(path: Path) -> SqliteDatabase:
    # os.path answers no where pathlib raises: in a folder that can't be entered.
    if os.path.isfile(path) and path.stat().st_size:
        _check_revision(path, migrates=True)
    try:
        # Nobody else may read what agents said and saw. SQLite gives its side files the same mode.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise DatabaseRefused(
            f"database must be a writable file in an existing folder, got {error.strerror} at {path}. "
            "Choose another folder."
        ) from error
    database = SqliteDatabase(path, mode="rw")
    with database.writing() as connection:
        if stored_revision(connection) != REVISION:
            migrate(connection)
    return database


def open_existing(path: Path, *, read_only: bool) -> SqliteDatabase:
    if not os.path.isfile(path):
        found = "a folder" if os.path.isdir(path) else "nothing"
        raise DatabaseRefused(f"database must be an existing file, got {found} at {path}. Check the path.")
    _check_revision(path, migrates=False)
    return SqliteDatabase(path, mode="ro" if read_only else "rw")


def _engine(path: Path, mode: Mode) -> sa.Engine:
    uri = f"{path.absolute().as_uri()}?mode={mode}"

    def connect() -> sqlite3.Connection:
        # isolation_level=None: the driver begins no transactions of its own; `_begin` does.
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        connection.execute(f"PRAGMA busy_timeout={_BUSY_MILLISECONDS}")
        connection.execute("PRAGMA foreign_keys=ON")
        if mode == "ro":
            connection.execute("PRAGMA query_only=ON")
        else:
            connection.execute("PRAGMA journal_mode=WAL")
        return connection

    engine = sa.create_engine("sqlite+pysqlite://", creator=connect, poolclass=sa.QueuePool)
    begin = ("BEGIN",) if mode == "ro" else ("PRAGMA synchronous=FULL", "BEGIN IMMEDIATE")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        for statement in connection.get_execution_options().get(_BEGIN, begin):
            connection.exec_driver_sql(statement)

    return engine


def _check_revision(path: Path, *, migrates: bool) -> None:
    """Refuse what is not ours before anything could change it: even switching to WAL rewrites a file's header."""
    engine = _engine(path, "ro")
    try:
        with engine.begin() as connection:
            revision = stored_revision(connection)
    except exc.DBAPIError as error:
        raise DatabaseRefused(
            f"database must be a readable SQLite file, got {str(error.orig)!r} at {path}. "
            "Check the path and its folder."
        ) from error
    finally:
        engine.dispose()
    check_revision(revision, str(path), migrates=migrates)
