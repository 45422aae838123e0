"""The interface of a database for the store."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa

from replay.errors import ConnectionLost, DamagedDatabase, DatabaseRefused, OtherSchema, ReplayError
from replay.storage.format.damage import RAISED_BY_DAMAGE, first_damage
from replay.storage.format.schema import REVISION, buffer_state, metadata, schema_version

Result = TypeVar("Result")

_MOST_TRIES = 8
"""How often work is tried when the connection is lost. Each try waits for the server to come back."""


class Database(ABC):
    """Connections to one database. Write transactions run one after another: no other one changes what one of them
    reads. Every transaction raises DamagedDatabase as `naming_damage` does."""

    url: str
    """The path, or the URL without its password, for people."""
    path: Path | None
    """The database's file; None: it is no file."""
    read_only: bool
    compresses_text: bool
    """Whether this program compresses long texts; PostgreSQL compresses them itself and can search in them."""

    _engine: sa.Engine
    _snapshots: sa.Engine
    """The engine of transactions that only read."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[sa.Connection]:
        """One transaction, committed when the block ends and rolled back when it raises. A commit that returned
        survives a crash of the machine. Raises ConnectionLost if the server went away."""

    @abstractmethod
    def locking_rows(self) -> AbstractContextManager[sa.Connection]:
        """One transaction on rows that it locks itself: on a server it does not wait for other writers."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[sa.Connection]:
        """One consistent view for any number of statements."""

    @contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Turn an exception that damage caused into DamagedDatabase; every other one stays what it is. The database is
        searched for damage only after an exception, for the search takes long."""
        try:
            yield
        except ReplayError:
            raise
        except RAISED_BY_DAMAGE as error:
            try:
                with self._snapshots.begin() as connection:
                    found = first_damage(connection)
            except RAISED_BY_DAMAGE:
                found = "tables that can't be read"
            if found is None:
                raise
            raise DamagedDatabase(f"{found} at {self.url}") from error

    def write(self, work: Callable[[sa.Connection], Result]) -> Result:
        with self.writing() as connection:
            return work(connection)

    def write_rows(self, work: Callable[[sa.Connection], Result]) -> Result:
        """The result of idempotent `work` on rows that it locks itself, repeated when the connection is lost."""
        return _in_each(self.locking_rows, work)

    def read(self, question: Callable[[sa.Connection], Result]) -> Result:
        """The answer from one consistent view; the question is repeated when the connection is lost."""
        return _in_each(self.reading, question)

    @abstractmethod
    def erase(self, work: Callable[[sa.Connection], Result]) -> Result:
        """Do `work` in one write transaction, then rewrite the database without the deleted content. Raises ReplayError
        if other users of the database prevent the rewrite."""

    def damage(self, connection: sa.Connection) -> list[str]:
        """The damage that the database itself finds in its pages and indexes, if it can check them."""
        return []

    @abstractmethod
    def size(self, connection: sa.Connection) -> int:
        """The size of the database in bytes."""

    def close(self) -> None:
        self._engine.dispose()


def retried(work: Callable[[], Result]) -> Result:
    """The result of idempotent work, repeated when the connection is lost: its first try may have counted or not."""
    for _ in range(_MOST_TRIES - 1):
        try:
            return work()
        except ConnectionLost:
            continue
    return work()


def _in_each(
    transaction: Callable[[], AbstractContextManager[sa.Connection]], work: Callable[[sa.Connection], Result]
) -> Result:
    def tried() -> Result:
        with transaction() as connection:
            return work(connection)

    return retried(tried)


def stored_revision(connection: sa.Connection) -> str | None:
    """The revision of the schema; None for an empty database, and an empty text for another program's database."""
    tables = sa.inspect(connection).get_table_names()
    if schema_version.name not in tables:
        return "" if tables else None
    return str(connection.scalar(sa.select(schema_version.c.version_num)) or "")


def check_revision(revision: str | None, where: str, *, creates: bool) -> None:
    """Raises DatabaseRefused for a database of another program or schema. An empty database is accepted only if it
    `creates` tables."""
    if revision == REVISION or (revision is None and creates):
        return
    if revision is None or not re.fullmatch(r"[0-9]{4}", revision):
        raise DatabaseRefused(
            f"database must be one of agentloop's, got tables of something else or none at {where}. "
            "Check that it is the right database."
        )
    writer = "a newer" if revision > REVISION else "an older"
    raise OtherSchema(
        f"database must have schema {REVISION}, got {revision} of {writer} agentloop at {where}. "
        "Open it with the agentloop that wrote it, or choose another database."
    )


def create_tables(connection: sa.Connection) -> None:
    """Create all tables in an empty database, within the caller's transaction."""
    metadata.create_all(connection, checkfirst=False)
    connection.execute(buffer_state.insert(), [{"name": "changed", "value": 1}, {"name": "draws", "value": 0}])
    schema_version.create(connection, checkfirst=False)
    connection.execute(schema_version.insert().values(version_num=REVISION))
