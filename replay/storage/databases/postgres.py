"""A buffer on a server: everything special to PostgreSQL.

A write transaction begins with the buffer's lock. So writers run one after another, and each sees the commits of the
writers before it (READ COMMITTED takes a snapshot per statement). Texts are compared by bytes whatever the server's
collation, as in SQLite and Python.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from replay.errors import ConnectionLost, DamagedDatabase, DatabaseFailed, DatabaseRefused
from replay.storage.databases.database import Database, Result, check_revision, create_tables, stored_revision
from replay.storage.format.column_types import ExactText
from replay.storage.format.schema import metadata
from replay.storage.format.views import create_views

DRIVERS = ("postgresql", "postgresql+psycopg")

_LOCK = 0x61676E746C6F6F70
"""The advisory lock of a buffer is this number (the bytes of "agntloop") plus the oid of its schema. Every write
transaction holds it, and so does the transaction that creates the tables."""
_WAITS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0)
"""Seconds between tries to connect again. A caller does not notice a server that is back within nine seconds."""
_SETTINGS = {
    "connect_timeout": "5",
    "client_encoding": "utf8",
    "application_name": "agentloop",
    # A dead network is noticed in about a minute, not in the two hours of most systems.
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    # The same limit for an answer that the network lost during a statement (Linux; milliseconds).
    "tcp_user_timeout": "60000",
}
# A writer waits as long as SQLite's busy timeout. A writer whose machine vanished loses its lock.
_SESSION = "set lock_timeout = '120s'; set idle_in_transaction_session_timeout = '300s'"
_BEGIN = sa.text(
    f"select pg_advisory_xact_lock({_LOCK} + oid::bigint) from pg_namespace where nspname = current_schema()"  # noqa: S608
)
_ASK = sa.text("select 1")
"""Begins a transaction that locks rows itself, so that a dead connection is found before its first statement."""
_LOOK = sa.text("set local idle_in_transaction_session_timeout = 0")
"""Begins a transaction that only reads. It blocks no writer, so its caller may pause between rows."""
_FACTS = "select current_setting('server_encoding'), current_schema(), current_setting('search_path')"
_GONE = ("08", "57P01", "57P02", "57P03", "53300")
"""SQLSTATEs of a server that stops, starts or is full: https://www.postgresql.org/docs/current/errcodes-appendix.html"""
_NOTHING = "Nothing of the transaction was stored; what was stored before is safe."
_UNKNOWN = "Whether the transaction was stored is not known; what was stored before is safe."
_FORBIDDEN = "42501"
SECRETS = frozenset({"password", "sslpassword"})


class PostgresDatabase(Database):
    """A database on a server, or one schema of it (`?options=-csearch_path=NAME`)."""

    path = None
    compresses_text = False

    def __init__(self, url: sa.URL, *, read_only: bool) -> None:
        self.url = shown(url)
        self.read_only = read_only
        self._engine = _engine(url)
        self._snapshots = self._engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        self._writers = self._snapshots if read_only else self._engine

    def writing(self) -> AbstractContextManager[sa.Connection]:
        return self._committed(_BEGIN)

    def locking_rows(self) -> AbstractContextManager[sa.Connection]:
        return self._committed(_ASK)

    @contextmanager
    def _committed(self, opening: sa.TextClause) -> Iterator[sa.Connection]:
        with self._begun(self._writers, opening) as connection:
            with self._explained(_NOTHING):
                yield connection
            with self._explained(_NOTHING, if_lost=_UNKNOWN):
                connection.commit()

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        with self._begun(self._snapshots, _LOOK) as connection, self._explained("What was stored is safe."):
            yield connection

    def erase(self, work: Callable[[sa.Connection], Result]) -> Result:
        answer = self.write(work)
        engine = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        with (
            self._explained("Deleted content is gone for every reader. Run this again to remove its bytes."),
            engine.connect() as connection,
        ):
            quoted = connection.dialect.identifier_preparer.quote
            # All tables of the schema are named, so that none can be forgotten.
            connection.exec_driver_sql(f"vacuum (full) {', '.join(map(quoted, metadata.tables))}")
        return answer

    def size(self, connection: sa.Connection) -> int:
        return int(connection.scalar(sa.select(sa.func.pg_database_size(sa.func.current_database()))) or 0)

    def check(self, *, creates: bool) -> None:
        """Raises DatabaseRefused for another program's database, and at once for a server that can't be reached."""
        try:
            with self._snapshots.connect() as connection:
                encoding, schema, path = connection.execute(sa.text(_FACTS)).one()
                revision = stored_revision(connection) if schema is not None else None
        except exc.DBAPIError as error:
            raise DatabaseRefused(
                f"database must be a PostgreSQL database that can be reached, got {_first_line(error)!r} at "
                f"{self.url}. Start the server, make the database with createdb, and keep its password in PGPASSFILE."
            ) from error
        if schema is None:
            raise DatabaseRefused(
                f"database must have a schema to stand in, got none of search_path {path} at {self.url}. "
                "Create one with create schema."
            )
        if encoding != "UTF8":
            raise DatabaseRefused(
                f"database must have encoding UTF8, got {encoding} at {self.url}. Make one with createdb -E UTF8."
            )
        check_revision(revision, self.url, creates=creates)

    @contextmanager
    def _begun(self, engine: sa.Engine, opening: sa.TextClause) -> Iterator[sa.Connection]:
        """A connection in a transaction, which is rolled back unless it is committed. Waits for a server's restart."""
        with self._explained("Nothing was begun; what was stored before is safe.", final=True):
            connection = _connected(engine, opening)
        try:
            yield connection
        finally:
            # A server that is gone rolls back by itself; the result or exception of the block counts.
            with suppress(exc.DBAPIError):
                connection.close()

    @contextmanager
    def _explained(self, outcome: str, *, if_lost: str = "", final: bool = False) -> Iterator[None]:
        """Turn failures of the machine into one-line errors; wrong statements stay what they are. `if_lost` is the
        outcome if the connection was lost. `final` means that nobody tries again."""
        with self.naming_damage():
            try:
                yield
            except exc.DBAPIError as error:
                raise self._explanation(error, outcome, if_lost=if_lost, final=final) from error

    def _explanation(self, error: exc.DBAPIError, outcome: str, *, if_lost: str, final: bool) -> Exception:
        found = _first_line(error)
        if isinstance(error, exc.DataError):
            # Parameters were checked, so only a stored value can be out of range.
            return DamagedDatabase(f"{found!r} at {self.url}")
        lost = _is_lost(error)
        of_machine = lost or _sqlstate(error) == _FORBIDDEN
        if not (of_machine or isinstance(error, (exc.OperationalError, exc.InternalError))):
            return error
        kind = ConnectionLost if lost and not final else DatabaseFailed
        return kind(
            f"database must be intact and accessible, got {found!r} at {self.url}. {(lost and if_lost) or outcome}"
        )


def create(url: sa.URL) -> PostgresDatabase:
    database = open_existing(url, read_only=False, creates=True)
    with database.writing() as connection:
        if stored_revision(connection) is None:
            create_tables(connection)
            _fix_column_types(connection)
            create_views(connection)
    return database


def open_existing(url: sa.URL, *, read_only: bool, creates: bool = False) -> PostgresDatabase:
    database = PostgresDatabase(url, read_only=read_only)
    try:
        database.check(creates=creates)
    except BaseException:
        database.close()
        raise
    return database


def shown(url: sa.URL) -> str:
    """The URL without its password, wherever the password is in it."""
    masked = {key: "***" for key in SECRETS if key in url.query}
    return url.update_query_dict(masked).render_as_string(hide_password=True)


def _engine(url: sa.URL) -> sa.Engine:
    try:
        engine = sa.create_engine(
            url,
            isolation_level="READ COMMITTED",
            max_overflow=-1,  # the server limits the number of connections
            hide_parameters=True,
            connect_args={name: value for name, value in _SETTINGS.items() if name not in url.query},
        )
    except ImportError as error:
        raise DatabaseRefused(
            f"database must have its driver installed, got no psycopg for {shown(url)}. Install the extra: "
            "pip install 'agentloop-replay[postgres]'"
        ) from error

    @sa.event.listens_for(engine, "connect")
    def _prepare_session(connection: Any, record: Any) -> None:
        connection.autocommit = True
        connection.execute(_SESSION)
        connection.autocommit = False

    return engine


def _connected(engine: sa.Engine, opening: sa.TextClause) -> sa.Connection:
    for wait in _WAITS:
        try:
            return _opened(engine, opening)
        except exc.DBAPIError as error:
            if not _is_lost(error):
                raise
            time.sleep(wait)
    return _opened(engine, opening)


def _opened(engine: sa.Engine, opening: sa.TextClause) -> sa.Connection:
    connection = engine.connect()
    try:
        connection.begin()
        connection.execute(opening)
    except BaseException:
        with suppress(exc.DBAPIError):
            connection.close()
        raise
    return connection


def _is_lost(error: exc.DBAPIError) -> bool:
    """Whether the connection is gone, or could not be made again."""
    state = _sqlstate(error)
    # An error of the driver alone has no state.
    return (
        error.connection_invalidated
        or state.startswith(_GONE)
        or (isinstance(error, exc.OperationalError) and not state)
    )


def _sqlstate(error: exc.DBAPIError) -> str:
    return getattr(error.orig, "sqlstate", None) or ""


def _first_line(error: exc.DBAPIError) -> str:
    """The first line of the server's or the driver's message; neither repeats a password."""
    return next(iter(str(error.orig).splitlines()), type(error.orig).__name__)


def _fix_column_types(connection: sa.Connection) -> None:
    """Set how the server stores columns: texts sort by bytes, and blobs, already compressed, stay as they are.

    The server samples no column that is not looked up by: samples stay in its own tables after content was forgotten.
    """
    quoted, inspected = connection.dialect.identifier_preparer.quote, sa.inspect(connection)
    for table in metadata.sorted_tables:
        looked_up = {name for index in inspected.get_indexes(table.name) for name in index["column_names"]}
        looked_up.add(next(iter(table.primary_key.columns)).name)
        for column in table.columns:
            kind = column.type.dialect_impl(connection.dialect)
            place = f"alter table {quoted(table.name)} alter column {quoted(column.name)}"
            if isinstance(column.type, ExactText):
                connection.exec_driver_sql(f'{place} type text collate "C"')
            elif isinstance(kind, sa.LargeBinary):
                connection.exec_driver_sql(f"{place} set storage external")
            if column.name not in looked_up and column.type.python_type not in (int, float, bool):
                connection.exec_driver_sql(f"{place} set statistics 0")
