"""Stored facts that no draw takes: episodes of evaluations, and answers of deterministic tools."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from context.messages import content_hash
from replay.records import HeldOutEpisode, ObservationRecord
from replay.storage.format.rows import chunked, conversation_row
from replay.storage.format.schema import held_out, observations
from replay.storage.statements import insert, selected
from replay.storage.validate import checked

SAID = ("num_messages", "said", "checksum")
"""The columns of messages: see `rows.conversation_row`."""
FACTS = tuple(field.name for field in fields(HeldOutEpisode) if field.name != "messages")
_OBSERVED = [observations.c[field.name] for field in fields(ObservationRecord)]


def put_episodes(connection: sa.Connection, episodes: Sequence[HeldOutEpisode], *, compressed: bool) -> None:
    """Store episodes of evaluations, replacing earlier ones of the same run, iteration and number."""
    checked(episodes, "held-out episode", "number")
    rows = []
    for episode in episodes:
        facts = {name: getattr(episode, name) for name in FACTS}
        here = (held_out.c[name] == facts[name] for name in ("run", "iteration", "number"))
        connection.execute(held_out.delete().where(*here))
        said, _ = conversation_row("", episode.messages, compressed=compressed)
        rows.append(facts | {name: said[name] for name in SAID})
    for chunk in chunked(rows):
        insert(connection, held_out, chunk)


def delete_older_evaluations(connection: sa.Connection, run: str, evaluations: int) -> None:
    """Delete all but the newest `evaluations` of a run."""
    made = sa.select(held_out.c.iteration).where(held_out.c.run == run).distinct()
    for iteration in connection.scalars(made.order_by(held_out.c.iteration.desc())).all()[evaluations:]:
        connection.execute(held_out.delete().where(held_out.c.run == run, held_out.c.iteration == iteration))


def remember(connection: sa.Connection, records: Sequence[ObservationRecord]) -> None:
    """Store answers of tools. If a call has a stored answer, that one stays."""
    make: Any = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    statement = make(observations).on_conflict_do_nothing()
    for chunk in chunked(sorted(records, key=lambda record: record.id)):
        rows = [{**vars(record), "arguments": json.dumps(dict(record.arguments), sort_keys=True)} for record in chunk]
        connection.execute(statement, [{**row, "checksum": _checksum(row)} for row in rows])


def remembered(connection: sa.Connection, environment: str, tasks: Sequence[str]) -> list[ObservationRecord]:
    """The stored answers of one environment's tools for these tasks. A damaged answer is left out: the tool runs
    again."""
    columns = [*_OBSERVED, observations.c.checksum]
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
    return content_hash([str(row[column.name]) for column in _OBSERVED])
