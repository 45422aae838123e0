"""Writing rows: whole or not at all, and the same row only once."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from context.authors import AuthorTable
from context.messages import Message, canonical_json
from replay.records import EVICTED, REDACTED, REMOVED_TASK, GroupRecord, PolicyRecord, RunRecord, TaskRecord, Trajectory
from replay.storage.counters import next_number
from replay.storage.format import schema
from replay.storage.format.encoding import encode_log_probs
from replay.storage.format.rows import (
    GROUP_COLUMNS,
    LOG_PROB_FIELDS,
    RECORD_COLUMNS,
    Row,
    as_read,
    checked_of,
    chunked,
    conversation_row,
    known,
    node_rows,
    node_values,
    now,
    record_checksum,
    segment_rows,
    segment_values,
    tokens_checksum,
)
from replay.storage.statements import insert, selected
from replay.storage.validate import SUMMARY, checked, refused, validate, with_segments

_author_table = lru_cache(8)(AuthorTable.from_json)
Redactor = Callable[[tuple[Message, ...]], Sequence[Message] | None]
"""Returns the messages to store instead of the given ones; None: no messages."""


@dataclass(frozen=True)
class AppendReport:
    inserted: int
    duplicates: int
    """Trajectories that were stored already, with the same content."""
    redacted: int = 0
    """Inserted rows whose messages were changed: their tokens are not stored."""


@dataclass(frozen=True)
class PreparedRow:
    record: Row
    derived: Row
    """Columns that follow from the row's tokens and messages."""
    segments: list[Row]
    nodes: list[Row]
    messages: Row | None
    is_redacted: bool
    """Whether its messages were changed. Tokens can't be changed and still be what the policy sampled, so none is
    stored."""


@dataclass(frozen=True)
class Prepared:
    """Checked and encoded rows, by key."""

    tasks: dict[str, Row]
    groups: dict[str, Row]
    trajectories: dict[str, PreparedRow]
    repeated: int
    """Trajectories given more than once."""


def prepare(
    task_records: Sequence[TaskRecord],
    group_records: Sequence[GroupRecord],
    rows: Sequence[Trajectory],
    runs: Mapping[str, RunRecord],
    *,
    redact: Redactor | None = None,
    compress_text: bool,
) -> Prepared:
    """Rows that are checked, redacted, hashed and compressed: all work that needs no lock of the database. `runs` are
    the runs of the rows, by id."""
    prepared = Prepared({}, {}, {}, repeated=len(rows) - len({row.id for row in rows}))
    for task, row in zip(task_records, checked(task_records, "task", "hash"), strict=True):
        given = {**row, "payload": _json(task)}
        _check_same("task", task.hash, prepared.tasks.setdefault(task.hash, given), given)
    for row in checked(group_records, "group", "id"):
        _check_same("group", row["id"], prepared.groups.setdefault(row["id"], row), row)
    for id in dict.fromkeys(row.record.run for row in rows):
        authors, size = _author_table(runs[id].authors), runs[id].vocab_size
        mine = [with_segments(row, authors, size) if row.nodes else row for row in rows if row.record.run == id]
        for trajectory, (found, segments) in zip(mine, validate(mine, authors, size), strict=True):
            made = _prepared(replace(trajectory, segments=segments), found, redact, compress_text)
            _check_same("trajectory", trajectory.id, prepared.trajectories.get(trajectory.id, made).record, made.record)
            prepared.trajectories[trajectory.id] = made
    return prepared


def _prepared(trajectory: Trajectory, found: Row, redact: Redactor | None, compress_text: bool) -> PreparedRow:
    said = trajectory.messages if redact is None else tuple(redact(trajectory.messages) or ())
    is_redacted = said != trajectory.messages
    record = found | {name: known(found[name]) for name in LOG_PROB_FIELDS}
    if is_redacted:
        # A hash would give the removed part away to a person who knows the rest of the text.
        record["content_hash"] = ""
    session = [] if is_redacted else list(node_rows(trajectory.id, trajectory.nodes))
    parts = [] if is_redacted or session else list(segment_rows(trajectory.id, trajectory.segments))
    row, said_bytes = conversation_row(trajectory.id, said, compressed=compress_text)
    stored = [*map(segment_values, parts), *map(node_values, session)]
    checksum = tokens_checksum(map(as_read, stored))
    derived: Row = {
        "num_bytes": sum(len(tokens) for *_, tokens in stored) + (said_bytes if said else 0),
        "num_messages": len(said),
        "segments_checksum": None if is_redacted else checksum,
    }
    derived["record_checksum"] = record_checksum(as_read(checked_of({**record, **derived})))
    return PreparedRow(record, derived, parts, session, row if said else None, is_redacted)


def _json(task: TaskRecord) -> str:
    try:
        return canonical_json(task.payload)
    except (TypeError, ValueError) as error:
        raise refused("payload", f"be JSON ({error})", task.payload, f"task {task.hash}") from error


def _check_same(kind: str, key: str, stored: Row, given: Row) -> None:
    if stored != given:
        name = next(name for name in given if stored[name] != given[name])
        raise refused(name, f"be the stored {stored[name]!r} of the same id", given[name], f"{kind} {key}")


def append(connection: sa.Connection, prepared: Prepared, created_at: Mapping[str, str] = {}) -> AppendReport:
    """Store prepared rows. A redacted row is still used by the update of its own iteration, but is never replayed.

    `created_at` has the times, by id, of rows that were stored elsewhere before.
    """
    _remember_tasks(connection, prepared)
    new_tasks, new_groups, new_ids = missing_rows(connection, prepared)
    insert(connection, schema.tasks, [prepared.tasks[hash] for hash in new_tasks])
    insert(connection, schema.groups, [prepared.groups[id] for id in new_groups])
    stamp = {"created_at": now(), "changed": next_number(connection, "changed")}
    new = [prepared.trajectories[id] for id in new_ids]
    hidden = {"state": EVICTED, "state_reason": REDACTED}
    states: list[Row] = [hidden if row.is_redacted else {"state_reason": None} for row in new]
    rows = [{**row.record, **row.derived, **stamp, **state} for row, state in zip(new, states, strict=True)]
    rows = [{**row, "created_at": created_at.get(row["id"], row["created_at"])} for row in rows]
    insert(connection, schema.trajectories, rows)
    insert(connection, schema.segments, [part for row in new for part in row.segments])
    insert(connection, schema.nodes, [node for row in new for node in row.nodes])
    insert(connection, schema.messages, [row.messages for row in new if row.messages is not None])
    return AppendReport(
        inserted=len(new),
        duplicates=len(prepared.trajectories) - len(new) + prepared.repeated,
        redacted=sum(row.is_redacted for row in new),
    )


def _remember_tasks(connection: sa.Connection, prepared: Prepared) -> None:
    """Restore what was removed of a task with its last row, now that the task is stored again."""
    for chunk in chunked(list(prepared.tasks)):
        removed = schema.tasks.c.hash.in_(chunk) & (schema.tasks.c.payload == REMOVED_TASK)
        for hash in connection.scalars(sa.select(schema.tasks.c.hash).where(removed)).all():
            given = {name: prepared.tasks[hash][name] for name in ("payload", "tools")}
            connection.execute(schema.tasks.update().where(schema.tasks.c.hash == hash).values(given))


def missing_rows(connection: sa.Connection, prepared: Prepared) -> tuple[list[str], list[str], list[str]]:
    """The keys of the tasks, groups and trajectories that are not stored yet. Raises InvalidRecord if one of the rows
    must not be stored."""
    records = {id: row.record for id, row in prepared.trajectories.items()}
    unknown = _missing(connection, schema.trajectories, RECORD_COLUMNS, records)
    facts = {id: {name: records[id][name] for name in schema.FACTS} for id in unknown}
    missing = (
        _missing(connection, schema.tasks, [*schema.tasks.c], prepared.tasks),
        _missing(connection, schema.groups, GROUP_COLUMNS, prepared.groups),
        _missing(connection, schema.reclaimed, [schema.reclaimed.c[name] for name in schema.FACTS], facts),
    )
    _check_groups(connection, prepared.groups, records)
    return missing


def _missing(
    connection: sa.Connection, table: sa.Table, columns: Sequence[sa.ColumnElement[Any]], rows: Mapping[str, Row]
) -> list[str]:
    """The keys that are not stored. Raises InvalidRecord if another row has a key; state and summary may differ."""
    stored = _stored(connection, table, columns, list(rows))
    for id, there in stored.items():
        given = rows[id] | {name: there[name] for name in ("state", *SUMMARY) if name in there}
        _check_same(table.name, id, there, given)
    return [id for id in rows if id not in stored]


def _stored(
    connection: sa.Connection, table: sa.Table, columns: Sequence[sa.ColumnElement[Any]], keys: Sequence[str]
) -> dict[str, Row]:
    (key,) = table.primary_key.columns
    names = [str(column.key) for column in columns]
    rows = [dict(zip(names, values, strict=True)) for values in selected(connection, columns, key, keys)]
    return {row[key.key]: row for row in rows}


def _check_groups(connection: sa.Connection, given: Mapping[str, Row], records: Mapping[str, Row]) -> None:
    """Raises InvalidRecord unless each member has the run, task and iteration of its group."""
    earlier = {row["group"] for row in records.values()} - given.keys()
    found = {**given, **_stored(connection, schema.groups, GROUP_COLUMNS, sorted(earlier))}
    for id, row in records.items():
        group = found.get(row["group"])
        if group is None:
            raise refused("group", "be appended with or before its members", row["group"], f"trajectory {id}")
        for name in ("run", "task", "iteration"):
            if row[name] != group[name]:
                raise refused(name, f"be that of its group ({group[name]!r})", row[name], f"trajectory {id}")


def add_run(connection: sa.Connection, run: RunRecord) -> int:
    """Store a run, or the new configuration of a known run, and return how often the run has been resumed."""
    (columns,) = checked([run], "run", "id")
    here, columns_of = schema.runs.c.id == run.id, schema.runs.c
    known = sa.select(columns_of.authors_hash, columns_of.epoch, columns_of.config).where(here)
    stored, config = connection.execute(known).one_or_none(), json.dumps(dict(run.config))
    if stored is None:
        given = None if run.fingerprint is None else canonical_json(run.fingerprint)
        row = {**columns, "config": config, "fingerprint": given, "started_at": now()}
        connection.execute(schema.runs.insert().values(row))
        return 0
    if stored.authors_hash != run.authors_hash:
        raise refused("authors_hash", f"be the stored {stored.authors_hash!r}", run.authors_hash, f"run {run.id}")
    if stored.config != config:  # for example when the run was lengthened
        connection.execute(schema.runs.update().where(here).values(config=config))
    return int(stored.epoch)


def add_policy(connection: sa.Connection, policy: PolicyRecord) -> None:
    (columns,) = checked([policy], "policy", "version")
    same = (schema.policies.c.run == policy.run) & (schema.policies.c.version == policy.version)
    connection.execute(schema.policies.delete().where(same))
    connection.execute(schema.policies.insert().values({**columns, "created_at": now()}))


def add_scores(
    connection: sa.Connection, run: str, version: int, scores: Mapping[tuple[str, int], npt.NDArray[np.float32]]
) -> None:
    """Store scores, in place of all earlier scores of the same trajectories."""
    for chunk in chunked(sorted({trajectory for trajectory, _ in scores})):
        connection.execute(schema.token_scores.delete().where(schema.token_scores.c.trajectory.in_(chunk)))
    place = {"run": run, "policy_version": version}
    rows = [
        {"trajectory": trajectory, "position": position, **place, "log_probs": encode_log_probs(values)}
        for (trajectory, position), values in scores.items()
    ]
    insert(connection, schema.token_scores, rows)


def add_metrics(connection: sa.Connection, run: str, iteration: int, values: Mapping[str, float]) -> None:
    here = (schema.metrics.c.run == run) & (schema.metrics.c.iteration == iteration)
    for chunk in chunked(list(values)):
        connection.execute(schema.metrics.delete().where(here & schema.metrics.c.name.in_(chunk)))
    place = {"run": run, "iteration": iteration}
    rows = [{**place, "name": name, "value": known(float(value))} for name, value in values.items()]
    insert(connection, schema.metrics, rows)
