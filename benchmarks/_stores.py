"""What the buffer is compared with: the least a database can do, and what is often done instead."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
import torch
from sqlalchemy import orm
from sqlalchemy.orm import Mapped

from context.messages import to_template
from context.tokens.token_sequence import TokenSequence
from replay import Trajectory

FIELDS = ("token_ids", "authors", "behavior_log_probs", "policy_versions")
DTYPES = (np.int32, np.uint8, np.float32, np.int32)


def raw_values(row: Trajectory) -> tuple[str | bytes, ...]:
    """Id, one blob per field, and the messages as JSON."""
    tokens = row.segments[0].tokens
    messages = json.dumps([to_template(message) for message in row.messages])
    return (row.id, *(getattr(tokens, field).tobytes() for field in FIELDS), messages)


def raw_bytes(row: Trajectory) -> int:
    """Of its arrays and messages, as they are in memory."""
    return sum(map(len, raw_values(row)[1:]))


def raw_tokens(row: Sequence[Any]) -> TokenSequence:
    return TokenSequence(*map(np.frombuffer, row, DTYPES))


class Raw:
    """sqlite3, one table, one blob per field, no checks, no compression; as durable as the buffer."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        for setting in ("journal_mode=WAL", "synchronous=FULL"):
            self._connection.execute(f"PRAGMA {setting}")
        self._connection.execute(f"CREATE TABLE raw (id TEXT PRIMARY KEY, {', '.join(FIELDS)}, messages)")

    def append(self, rows: Sequence[Trajectory]) -> None:
        values = [raw_values(row) for row in rows]
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany("INSERT INTO raw VALUES (?, ?, ?, ?, ?, ?)", values)
        self._connection.execute("COMMIT")

    def read(self, ids: Sequence[str]) -> list[TokenSequence]:
        marks = ", ".join("?" * len(ids))
        query = f"SELECT {', '.join(FIELDS)} FROM raw WHERE id IN ({marks})"  # noqa: S608  names of this file
        return [raw_tokens(row) for row in self._connection.execute(query, ids)]

    def close(self) -> None:
        self._connection.close()


class _Base(orm.DeclarativeBase):
    pass


class _Experience(_Base):
    __tablename__ = "experience"
    id: Mapped[str] = orm.mapped_column(primary_key=True)
    reward: Mapped[float]
    content: Mapped[Any] = orm.mapped_column(sa.PickleType)


@dataclass
class _Sampled:
    """What trainers that store experience so keep of a trajectory: an object with a tensor per field."""

    arrays: dict[str, Any]
    messages: list[dict[str, Any]]


class Pickled:
    """An ORM class with a pickled column in SQLite as it comes: rollback journal, a connection per session.

    Tensors, as trainers have them, are what takes long to pickle; NumPy arrays are quicker. A pickle runs what its
    writer wants: nothing else in this project reads one, and this reads only its own.
    """

    def __init__(self, path: Path, *, tensors: bool) -> None:
        self._tensors = tensors
        self._engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.NullPool)
        _Base.metadata.create_all(self._engine)

    def append(self, rows: Sequence[Trajectory]) -> None:
        with orm.Session(self._engine) as session:
            session.add_all(
                _Experience(id=row.id, reward=row.record.reward, content=self._content(row)) for row in rows
            )
            session.commit()

    def read(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        with orm.Session(self._engine) as session:
            found = session.scalars(sa.select(_Experience).where(_Experience.id.in_(ids)))
            return [row.content.arrays for row in found]

    def close(self) -> None:
        self._engine.dispose()

    def _content(self, row: Trajectory) -> _Sampled:
        arrays = {field: getattr(row.segments[0].tokens, field) for field in FIELDS}
        if self._tensors:
            arrays = {field: torch.tensor(array) for field, array in arrays.items()}
        return _Sampled(arrays, [to_template(message) for message in row.messages])
