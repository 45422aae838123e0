"""What deterministic tools answered, by task and calls: see `replay.records.ObservationRecord`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from context.messages import content_hash
from replay.records import ObservationRecord
from replay.storage.format.rows import chunked
from replay.storage.format.schema import observations
from replay.storage.statements import selected

_COLUMNS = [observations.c[field.name] for field in fields(ObservationRecord)]


def remember(connection: sa.Connection, records: Sequence[ObservationRecord]) -> None:
    """The first one that is stored of a call stays."""
    insert: Any = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    statement = insert(observations).on_conflict_do_nothing()
    for chunk in chunked(sorted(records, key=lambda record: record.id)):
        rows = [{**vars(record), "arguments": json.dumps(dict(record.arguments), sort_keys=True)} for record in chunk]
        connection.execute(statement, [{**row, "checksum": _checksum(row)} for row in rows])


def remembered(connection: sa.Connection, environment: str, tasks: Sequence[str]) -> list[ObservationRecord]:
    """All that one environment's tools answered for these tasks. What is not as it was written is left out: the tool
    is run again."""
    columns = [*_COLUMNS, observations.c.checksum]
    found = [dict(row._mapping) for row in selected(connection, columns, observations.c.task, tasks)]
    return [
        ObservationRecord(**{**row, "arguments": json.loads(row["arguments"])})
        for row in found
        if row["environment"] == environment and row.pop("checksum") == _checksum(row)
    ]


def forget_observations(connection: sa.Connection, tasks: Sequence[str]) -> None:
    for chunk in chunked(tasks):
        connection.execute(observations.delete().where(observations.c.task.in_(chunk)))


def _checksum(row: Mapping[str, Any]) -> str:
    return content_hash([str(row[column.name]) for column in _COLUMNS])
