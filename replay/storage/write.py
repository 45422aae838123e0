"""Putting rows in: whole or not at all, and the same row only once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from context.authors import AuthorTable
from context.messages import Message, canonical_json
from replay.errors import InvalidRecord
from replay.records import (
    DUPLICATE,
    ELIGIBLE,
    EVICTED,
    REDACTED,
    REMOVED_TASK,
    GroupRecord,
    PolicyRecord,
    RunRecord,
    TaskRecord,
    Trajectory,
)
from replay.storage.counters import next_number
from replay.storage.format.encoding import encode_log_probs, token_hash
from replay.storage.format.message_json import conversation_row
from replay.storage.format.rows import (
    CHECKED_COLUMNS,
    GROUP_COLUMNS,
    RECORD_COLUMNS,
    SEGMENT_COLUMNS,
    Row,
    as_read,
    chunked,
    known,
    now,
    record_checksum,
    segment_rows,
    segments_checksum,
    without_nan,
)
from replay.storage.format.schema import (
    groups,
    messages,
    metrics,
    policies,
    reclaimed,
    runs,
    segments,
    tasks,
    token_scores,
    trajectories,
)
from replay.storage.format.token_summary import SUMMARY
from replay.storage.reclaimed import FACTS, left_of, remove_unused_tasks
from replay.storage.statements import insert
from replay.storage.validate import Validated, checked, refused, validate

Redactor = Callable[[tuple[Message, ...]], Sequence[Message] | None]
"""The messages to store instead of those given; None: none of them."""


@dataclass(frozen=True)
class Admission:
    """What rows have to go through on their way in. What it turns away is `evicted`; without any content left, a few
    numbers of it are stored (`replay.storage.reclaimed`).

    A row turned away still feeds the update of the iteration that collected it, and its group keeps its statistics.
    """

    dedupe: bool = False
    """Not the tokens and messages of a row that says, token by token, what an eligible one of its task says."""
    redact: Redactor | None = None
    """Changes messages before they are stored. Tokens can't be changed and still be what the policy sampled: a row
    whose messages were changed is stored without its tokens."""


OPEN = Admission()


@dataclass(frozen=True)
class AppendReport:
    inserted: int
    duplicates: int
    """Trajectories that were stored already, with the same content."""
    clipped: int
    """Log-probs of the inserted rows that rounding had put above 0, stored as 0."""
    same_tokens: int = 0
    """Inserted rows whose tokens an eligible row of the task had already: a few numbers of them are stored."""
    redacted: int = 0
    """Inserted rows whose messages were changed: stored without their tokens."""


@dataclass(frozen=True)
class Prepared:
    """Checked and encoded rows, by key."""

    tasks: dict[str, Row]
    groups: dict[str, Row]
    trajectories: dict[str, Row]
    segments: dict[str, list[Row]]
    messages: dict[str, Row]
    """Of trajectories that have some."""
    derived: dict[str, Row]
    """Columns of a trajectory that follow from its tokens and messages."""
    clipped: dict[str, int]
    repeated: int
    """Trajectories given more than once."""
    withheld: dict[str, Row]
    """State and reason of rows whose tokens must not be stored."""


def prepare(
    task_records: Sequence[TaskRecord],
    group_records: Sequence[GroupRecord],
    rows: Sequence[Trajectory],
    authors: Mapping[str, AuthorTable],
    *,
    redact: Redactor | None = None,
    compress_text: bool,
) -> Prepared:
    """Everything that needs no database lock: check, redact, hash, compress."""
    prepared = Prepared({}, {}, {}, {}, {}, {}, {}, repeated=0, withheld={})
    for task, row in zip(task_records, checked(task_records, "task", "hash"), strict=True):
        _add_same(prepared.tasks, task.hash, {**row, "payload": _json(task)}, "task")
    for row in checked(group_records, "group", "id"):
        _add_same(prepared.groups, row["id"], row, "group")
    repeated = 0
    for trajectory, found in _validated(rows, authors):
        repeated += trajectory.id in prepared.trajectories
        _add_same(prepared.trajectories, trajectory.id, without_nan(found.row), "trajectory")
        said = trajectory.messages if redact is None else tuple(redact(trajectory.messages) or ())
        if said != trajectory.messages:
            # With the rest of a text known, a hash gives away what was taken out of it.
            prepared.withheld[trajectory.id] = {"state": EVICTED, "state_reason": REDACTED}
            prepared.trajectories[trajectory.id]["content_hash"] = ""
        prepared.segments[trajectory.id] = parts = list(segment_rows(trajectory.id, found.segments))
        num_bytes = sum(len(row["tokens"]) for row in parts)
        if said:
            row, said_bytes = conversation_row(trajectory.id, said, compressed=compress_text)
            prepared.messages[trajectory.id] = row
            num_bytes += said_bytes
        is_withheld = trajectory.id in prepared.withheld
        prepared.derived[trajectory.id] = _derived(
            prepared.trajectories[trajectory.id],
            token_hash=None if is_withheld else token_hash(found.segments),
            num_bytes=num_bytes,
            num_messages=len(said),
            segments_checksum=None if is_withheld else segments_checksum(map(_as_read_segment, parts)),
        )
        prepared.clipped[trajectory.id] = found.clipped
    return replace(prepared, repeated=repeated)


_segment_values = itemgetter(*(column.key for column in SEGMENT_COLUMNS))


def _as_read_segment(row: Row) -> list[Any]:
    return as_read(_segment_values(row))


def _derived(record: Row, **facts: Any) -> Row:
    """The facts of a row's content, and the checksum over them and its record."""
    values = {**record, **facts}
    return {**facts, "record_checksum": record_checksum(as_read(values[column.key] for column in CHECKED_COLUMNS))}


def _validated(
    rows: Sequence[Trajectory], authors: Mapping[str, AuthorTable]
) -> Iterator[tuple[Trajectory, Validated]]:
    for run in dict.fromkeys(row.record.run for row in rows):
        mine = [row for row in rows if row.record.run == run]
        yield from zip(mine, validate(mine, authors[run]), strict=True)


def _json(task: TaskRecord) -> str:
    try:
        return canonical_json(task.payload)
    except (TypeError, ValueError) as error:
        raise refused("payload", f"be JSON ({error})", task.payload, f"task {task.hash}") from error


def _add_same(rows: dict[str, Row], key: str, row: Row, kind: str) -> None:
    if rows.setdefault(key, row) != row:
        raise _taken(kind, key, rows[key], row)


def _taken(kind: str, key: str, stored: Mapping[str, Any], given: Row) -> InvalidRecord:
    name = next(name for name in given if stored[name] != given[name])
    return refused(name, f"be the stored {stored[name]!r} of the same id", given[name], f"{kind} {key}")


def append(connection: sa.Connection, prepared: Prepared, *, dedupe: bool = False) -> AppendReport:
    _remember_tasks(connection, prepared)
    missing = _missing_rows(connection, prepared)
    insert(connection, tasks, [prepared.tasks[hash] for hash in missing.tasks])
    insert(connection, groups, [prepared.groups[id] for id in missing.groups])
    stamp = {"created_at": now(), "changed": next_number(connection, "changed"), "state_reason": None}
    withheld = prepared.withheld | (_same_tokens(connection, prepared) if dedupe else {})
    new = missing.trajectories
    rows = [{**prepared.trajectories[id], **prepared.derived[id], **stamp, **withheld.get(id, {})} for id in new]
    reasons = {id: withheld[id]["state_reason"] for id in new if id in withheld}
    same = {id for id, reason in reasons.items() if reason != REDACTED}
    nothing_left = same | {id for id in reasons if id not in prepared.messages}
    insert(connection, trajectories, [row for row in rows if row["id"] not in nothing_left])
    turned_away = [row for row in rows if row["id"] in nothing_left]
    insert(connection, reclaimed, [left_of(row) for row in turned_away])
    remove_unused_tasks(connection, list({row["task"] for row in turned_away}))
    insert(connection, segments, [row for id in new if id not in reasons for row in prepared.segments[id]])
    insert(connection, messages, [prepared.messages[id] for id in new if id not in same and id in prepared.messages])
    return AppendReport(
        inserted=len(new),
        duplicates=len(prepared.trajectories) - len(new) + prepared.repeated,
        clipped=sum(prepared.clipped[id] for id in new),
        same_tokens=len(same),
        redacted=len(reasons) - len(same),
    )


def _remember_tasks(connection: sa.Connection, prepared: Prepared) -> None:
    """A task that went with its last row is known again when it comes again."""
    for chunk in chunked(list(prepared.tasks)):
        removed = tasks.c.hash.in_(chunk) & (tasks.c.payload == REMOVED_TASK)
        for hash in connection.scalars(sa.select(tasks.c.hash).where(removed)).all():
            given = {"payload": prepared.tasks[hash]["payload"]}
            connection.execute(tasks.update().where(tasks.c.hash == hash).values(given))


def _same_tokens(connection: sa.Connection, prepared: Prepared) -> dict[str, Row]:
    """State and reason of rows that repeat one of their run and task; the first one stays."""
    hashes = list(dict.fromkeys(row["token_hash"] for row in prepared.derived.values() if row["token_hash"]))
    rows = trajectories.c
    first: dict[tuple[str, str, str], str] = {}
    for chunk in chunked(hashes):
        query = sa.select(rows.run, rows.task, rows.token_hash, rows.id).where(rows.token_hash.in_(chunk))
        for run, task, tokens, id in connection.execute(
            query.where(rows.state == ELIGIBLE).order_by(rows.iteration, rows.slot, rows.id)
        ):
            first.setdefault((run, task, tokens), id)
    withheld = {}
    for id, row in prepared.trajectories.items():
        if row["state"] != ELIGIBLE or id in prepared.withheld:
            continue
        key = (row["run"], row["task"], prepared.derived[id]["token_hash"])
        if first.setdefault(key, id) != id:
            withheld[id] = {"state": EVICTED, "state_reason": f"{DUPLICATE}{first[key]}"}
    return withheld


def check(connection: sa.Connection, prepared: Prepared) -> None:
    """Raises what `append` would raise."""
    _missing_rows(connection, prepared)


@dataclass(frozen=True)
class _Missing:
    """Keys of what is not stored yet."""

    tasks: list[str]
    groups: list[str]
    trajectories: list[str]


def _missing_rows(connection: sa.Connection, prepared: Prepared) -> _Missing:
    unknown = _missing(connection, trajectories, RECORD_COLUMNS, prepared.trajectories, key="id")
    facts = {id: {name: prepared.trajectories[id][name] for name in FACTS} for id in unknown}
    missing = _Missing(
        tasks=_missing(connection, tasks, [*tasks.c], prepared.tasks, key="hash"),
        groups=_missing(connection, groups, GROUP_COLUMNS, prepared.groups, key="id"),
        trajectories=_missing(connection, reclaimed, [reclaimed.c[name] for name in FACTS], facts, key="id"),
    )
    _check_groups(connection, prepared)
    return missing


def _missing(
    connection: sa.Connection,
    table: sa.Table,
    columns: Sequence[sa.ColumnElement[Any]],
    rows: Mapping[str, Row],
    *,
    key: str,
) -> list[str]:
    """Those not stored; raises where another row has the key.

    A row's state may have moved on. What follows from its tokens is theirs, which have a hash: rounding does not count.
    """
    stored = _stored(connection, table, columns, list(rows), key=key)
    for id, there in stored.items():
        given = rows[id] | {name: there[name] for name in ("state", *SUMMARY) if name in there}
        if there != given:
            raise _taken(table.name, id, there, given)
    return [id for id in rows if id not in stored]


def _stored(
    connection: sa.Connection,
    table: sa.Table,
    columns: Sequence[sa.ColumnElement[Any]],
    keys: Sequence[str],
    *,
    key: str,
) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    names = [str(column.key) for column in columns]
    for chunk in chunked(keys):
        for values in connection.execute(sa.select(*columns).where(table.c[key].in_(chunk))):
            row = dict(zip(names, values, strict=True))
            rows[row[key]] = row
    return rows


def _check_groups(connection: sa.Connection, prepared: Prepared) -> None:
    """A member belongs to the run, task and iteration of its group."""
    place = ("run", "task", "iteration")
    named = dict.fromkeys(row["group"] for row in prepared.trajectories.values())
    earlier = [id for id in named if id not in prepared.groups]
    found = {**prepared.groups, **_stored(connection, groups, GROUP_COLUMNS, earlier, key="id")}
    for id, row in prepared.trajectories.items():
        group = found.get(row["group"])
        if group is None:
            raise refused("group", "be appended with or before its members", row["group"], f"trajectory {id}")
        for name in place:
            if row[name] != group[name]:
                raise refused(name, f"be that of its group ({group[name]!r})", row[name], f"trajectory {id}")


def add_run(connection: sa.Connection, run: RunRecord) -> int:
    """How often the run has been resumed."""
    (columns,) = checked([run], "run", "id")
    stored = connection.execute(sa.select(runs.c.authors_hash, runs.c.epoch).where(runs.c.id == run.id)).one_or_none()
    if stored is None:
        given = None if run.fingerprint is None else canonical_json(run.fingerprint)
        row = {**columns, "config": json.dumps(dict(run.config)), "fingerprint": given, "started_at": now()}
        connection.execute(runs.insert().values(row))
        return 0
    if stored.authors_hash != run.authors_hash:
        raise refused("authors_hash", f"be the stored {stored.authors_hash!r}", run.authors_hash, f"run {run.id}")
    return int(stored.epoch)


def add_policy(connection: sa.Connection, policy: PolicyRecord) -> None:
    (columns,) = checked([policy], "policy", "version")
    same = (policies.c.run == policy.run) & (policies.c.version == policy.version)
    connection.execute(policies.delete().where(same))
    connection.execute(policies.insert().values({**columns, "created_at": now()}))


def add_scores(
    connection: sa.Connection, run: str, version: int, scores: Mapping[tuple[str, int], npt.NDArray[np.float32]]
) -> None:
    """In place of earlier scores of these trajectories."""
    for chunk in chunked(sorted({trajectory for trajectory, _ in scores})):
        connection.execute(token_scores.delete().where(token_scores.c.trajectory.in_(chunk)))
    place = {"run": run, "policy_version": version}
    rows = [
        {"trajectory": trajectory, "position": position, **place, "log_probs": encode_log_probs(values)}
        for (trajectory, position), values in scores.items()
    ]
    insert(connection, token_scores, rows)


def add_metrics(connection: sa.Connection, run: str, iteration: int, values: Mapping[str, float]) -> None:
    here = (metrics.c.run == run) & (metrics.c.iteration == iteration)
    for chunk in chunked(list(values)):
        connection.execute(metrics.delete().where(here & metrics.c.name.in_(chunk)))
    insert(
        connection,
        metrics,
        [
            {"run": run, "iteration": iteration, "name": name, "value": known(float(value))}
            for name, value in values.items()
        ],
    )
