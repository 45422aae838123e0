"""What the store asks of a database, whichever it is."""

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
"""Each of them waits for the server to come back."""


class Database(ABC):
    """Connections to one database. Write transactions come one after another: what one of them reads, no other changes
    meanwhile. Every transaction raises DamagedDatabase as `naming_damage` does."""

    url: str
    """For people: the path, or the URL without its password."""
    path: Path | None
    """None: the database is no file."""
    read_only: bool
    compresses_text: bool
    """Whether it must be given long texts compressed; another one does it by itself, and can search in them."""

    _engine: sa.Engine
    _snapshots: sa.Engine
    """Begins transactions that only read."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[sa.Connection]:
        """One transaction: committed when the block ends, rolled back when it raises. A commit that returned survives
        the machine. Raises ConnectionLost where the server went away meanwhile."""

    @abstractmethod
    def locking_rows(self) -> AbstractContextManager[sa.Connection]:
        """One transaction on rows that it locks itself: on a server it need not wait until other writers are done."""

    @abstractmethod
    def one_statement(self) -> AbstractContextManager[sa.Connection]:
        """For a statement that is a transaction of its own: a server is asked once, not to begin and to end one too."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[sa.Connection]:
        """One consistent view, however many statements ask it."""

    @contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Raises DamagedDatabase in place of an exception that damage led to. Every other one stays what it is: only
        after one is the database looked through, which takes long."""
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
        """Idempotent `work` on rows that it locks itself, done again when the connection is lost."""
        return _in_each(self.locking_rows, work)

    def ask(self, statement: Callable[[sa.Connection], Result]) -> Result:
        """One idempotent statement, of those that are so frequent that a server should have little work with them."""
        return _in_each(self.one_statement, statement)

    def read(self, question: Callable[[sa.Connection], Result]) -> Result:
        """The answer from one consistent view, asked again when the connection is lost."""
        return _in_each(self.reading, question)

    @abstractmethod
    def erase(self, work: Callable[[sa.Connection], Result]) -> Result:
        """`work` in one write transaction, and then the database written again without what it deleted; raises
        ReplayError where others who use the database keep it from being written again."""

    def damage(self, connection: sa.Connection) -> list[str]:
        """What the database itself finds wrong with its pages and indexes, where it can be asked."""
        return []

    @abstractmethod
    def size(self, connection: sa.Connection) -> int:
        """Bytes on disk."""

    def close(self) -> None:
        self._engine.dispose()


def retried(work: Callable[[], Result]) -> Result:
    """Idempotent work, done again when the connection is lost: nobody knows whether the first time counted."""
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
    """None: an empty database. Raises nothing for a foreign one: it answers an empty string."""
    tables = sa.inspect(connection).get_table_names()
    if schema_version.name not in tables:
        return "" if tables else None
    return str(connection.scalar(sa.select(schema_version.c.version_num)) or "")


def check_revision(revision: str | None, where: str, *, creates: bool) -> None:
    """Refuse what is not ours or of another schema, and an empty database unless tables are about to be made."""
    if revision == REVISION or (revision is None and creates):
        return
    if revision is None or not re.fullmatch(r"[0-9]{4}", revision):
        raise DatabaseRefused(
            f"database must be one of agentloop's, got tables of something else or none at {where}. "
            "Check that it is the right one."
        )
    writer = "a newer" if revision > REVISION else "an older"
    raise OtherSchema(
        f"database must have schema {REVISION}, got {revision} of {writer} agentloop at {where}. "
        "Open it with the agentloop that wrote it, or choose another."
    )


def create_tables(connection: sa.Connection) -> None:
    """All of them within the caller's transaction, in an empty database."""
    metadata.create_all(connection, checkfirst=False)
    connection.execute(buffer_state.insert(), [{"name": "changed", "value": 1}, {"name": "draws", "value": 0}])
    schema_version.create(connection, checkfirst=False)
    connection.execute(schema_version.insert().values(version_num=REVISION))
