"""What the store asks of a database, whichever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa

from replay.errors import ConnectionLost

Result = TypeVar("Result")

_MOST_TRIES = 8
"""Each of them waits for the server to come back."""


class Database(ABC):
    """Connections to one database at the newest schema; transactions that read one snapshot or write all or nothing.

    Write transactions come one after another, from their first statement to their commit: what one of them reads, no
    other changes meanwhile.
    """

    url: str
    """For people: the path, or the URL without its password."""
    path: Path | None
    """None: the database is no file."""
    read_only: bool
    groups_by_sorting: bool
    """Whether it sorts all rows to count them by a value, which takes longer than to hand them over."""
    compresses_text: bool
    """Whether it must be given long texts compressed; another one does it by itself, and can search in them."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[sa.Connection]:
        """One transaction: committed when the block ends, rolled back when it raises.

        A commit that returned survives the machine. Raises ConnectionLost where the server went away meanwhile.
        """

    @abstractmethod
    def beside_writers(self) -> AbstractContextManager[sa.Connection]:
        """One transaction on rows that it locks itself: on a server it need not wait until other writers are done."""

    @abstractmethod
    def one_statement(self) -> AbstractContextManager[sa.Connection]:
        """For a statement that is a transaction of its own: a server is asked once, not to begin and to end one too."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[sa.Connection]:
        """One consistent view, however many statements ask it."""

    def write(self, work: Callable[[sa.Connection], Result]) -> Result:
        """`work` in one write transaction; raises ConnectionLost as `writing` does."""
        with self.writing() as connection:
            return work(connection)

    def write_beside(self, work: Callable[[sa.Connection], Result]) -> Result:
        """Idempotent `work` beside other writers, done again when the connection is lost."""

        def done() -> Result:
            with self.beside_writers() as connection:
                return work(connection)

        return retried(done)

    def read(self, question: Callable[[sa.Connection], Result]) -> Result:
        """The answer from one consistent view, asked again when the connection is lost."""

        def asked() -> Result:
            with self.reading() as connection:
                return question(connection)

        return retried(asked)

    @abstractmethod
    def erase(self, work: Callable[[sa.Connection], Result]) -> Result:
        """`work` in one write transaction, and then the database written anew without what it deleted.

        Raises ReplayError where others who use the database keep it from being written anew.
        """

    def damage(self, connection: sa.Connection) -> list[str]:
        """What the database itself finds wrong with its pages and indexes, where it can be asked."""
        return []

    @abstractmethod
    def size(self, connection: sa.Connection) -> int:
        """Bytes on disk."""

    @abstractmethod
    def close(self) -> None:
        """Give every connection back."""


def retried(work: Callable[[], Result]) -> Result:
    """Idempotent work, done again when the connection is lost: nobody knows whether the first time counted."""
    for _ in range(_MOST_TRIES - 1):
        try:
            return work()
        except ConnectionLost:
            continue
    return work()
