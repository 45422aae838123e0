"""Opening a database: every SQLite particular of the project stands here.

A write transaction begins with BEGIN IMMEDIATE. A deferred one that reads before it writes would lose updates or fail
with "database is locked", which no timeout mends.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy import exc

from replay.errors import DatabaseRefused, ReplayError
from replay.schema import REVISION, VERSION_TABLE

_BUSY_MILLISECONDS = 30_000
_BEGIN = "replay_begin"
_MIGRATIONS = Path(__file__).parent / "migrations"

Mode = Literal["ro", "rw"]


class Database:
    """Connections to one file, at the newest schema; transactions that read one snapshot or write all or nothing."""

    def __init__(self, path: Path, *, mode: Mode) -> None:
        self.path = path
        self.read_only = mode == "ro"
        self._engine = _engine(path, mode)
        self._snapshots = self._engine.execution_options(**{_BEGIN: ("BEGIN",)})
        self._hasty = self._engine.execution_options(**{_BEGIN: ("PRAGMA synchronous=NORMAL", "BEGIN IMMEDIATE")})

    @contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[sa.Connection]:
        """One transaction: committed when the block ends, rolled back when it raises.

        Durable: a commit that returned also survives the machine, at one fsync. Otherwise it survives the process,
        and the machine together with the next durable one.
        """
        with self._explained(), (self._engine if durable else self._hasty).begin() as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """One consistent view, however many statements ask it."""
        with self._explained(), self._snapshots.begin() as connection:
            yield connection

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


def create_database(location: str | Path) -> Database:
    """Open the database for writing, at the newest schema; made if there is none.

    Raises DatabaseRefused for a database of something else or of a newer agentloop, and leaves it as it is.
    """
    path = database_path(location)
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
    database = Database(path, mode="rw")
    with database.writing() as connection:
        if _stored_revision(connection) != REVISION:
            _migrate(connection)
    return database


def open_database(location: str | Path, *, read_only: bool) -> Database:
    """Open an existing database; never makes one, never migrates one."""
    path = database_path(location)
    if not os.path.isfile(path):
        found = "a folder" if os.path.isdir(path) else "nothing"
        raise DatabaseRefused(f"database must be an existing file, got {found} at {path}. Check the path.")
    _check_revision(path, migrates=False)
    return Database(path, mode="ro" if read_only else "rw")


def database_path(location: str | Path) -> Path:
    """The file behind a path or a sqlite:/// URL."""
    if isinstance(location, Path) or "://" not in location:
        return Path(location)
    try:
        url = sa.make_url(location)
    except exc.ArgumentError as error:
        raise DatabaseRefused(
            f"database must be a path or sqlite:///path, got a malformed URL {location!r}."
        ) from error
    if url.get_backend_name() != "sqlite" or not url.database:
        raise DatabaseRefused(
            f"database must be a SQLite file, got {url.render_as_string(hide_password=True)}. Give a path."
        )
    return Path(url.database)


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
            revision = _stored_revision(connection)
    except exc.DBAPIError as error:
        raise DatabaseRefused(
            f"database must be a readable SQLite file, got {str(error.orig)!r} at {path}. "
            "Check the path and its folder."
        ) from error
    finally:
        engine.dispose()
    if revision is None and migrates:
        return
    if revision is None or not re.fullmatch(r"[0-9]{4}", revision):
        raise DatabaseRefused(
            f"database must be one of agentloop's, got tables of something else or none at {path}. Check the path."
        )
    if revision > REVISION:
        raise DatabaseRefused(
            f"database must have schema {REVISION} or older, got {revision} at {path}, written by a newer agentloop. "
            "Upgrade agentloop."
        )
    if revision < REVISION and not migrates:
        raise DatabaseRefused(
            f"database must have schema {REVISION}, got {revision} at {path}. Resume its run once to migrate it."
        )


def _stored_revision(connection: sa.Connection) -> str | None:
    """None: an empty database. Raises nothing for a foreign one: it answers an empty string."""
    tables = sa.inspect(connection).get_table_names()
    if VERSION_TABLE not in tables:
        return "" if tables else None
    return str(connection.scalar(sa.select(sa.column("version_num")).select_from(sa.table(VERSION_TABLE))) or "")


def _migrate(connection: sa.Connection) -> None:
    """To the newest schema within the caller's transaction: the old schema or the new one, never between."""
    # Alembic takes longer to import than everything else here, and is needed once in a database's life.
    from alembic import command
    from alembic.config import Config

    attributes: dict[str, Any] = {"connection": connection}
    config = Config(attributes=attributes)
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    command.upgrade(config, "head")
