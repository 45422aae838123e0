"""The tasks of stored rows, by hash."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from replay.records import TaskRecord
from replay.rows import chunked
from replay.schema import tasks


def task_records(connection: sa.Connection, hashes: Sequence[str]) -> dict[str, TaskRecord]:
    columns = [tasks.c.hash, tasks.c.environment, tasks.c.payload]
    found = selected(connection, columns, tasks.c.hash, hashes)
    return {row.hash: TaskRecord(row.hash, row.environment, json.loads(row.payload)) for row in found}


def selected(
    connection: sa.Connection, columns: Sequence[sa.ColumnElement[Any]], key: sa.ColumnElement[str], keys: Sequence[str]
) -> Iterator[sa.Row[Any]]:
    for chunk in chunked(list(dict.fromkeys(keys))):
        yield from connection.execute(sa.select(*columns).where(key.in_(chunk)))
