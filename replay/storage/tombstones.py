"""Tombstones: the facts that stay of a deleted row. Draws name the row for ever, so that lineage still shows the
updates that used it. A task's payload is deleted with its last row."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from replay.records import COMMITTED, EVICTED, FORGOTTEN, REMOVED_TASK
from replay.storage.collecting.never_drawn import forget_observations
from replay.storage.counters import next_number
from replay.storage.format import schema
from replay.storage.format.rows import chunked
from replay.storage.format.schema import FACTS, draws, groups, held_out, reclaimed, tasks, tickets, trajectories
from replay.storage.statements import remove, selected

ALL_RUNS = "*"
_rows, _left = trajectories.c, reclaimed.c


@dataclass(frozen=True)
class Forgotten:
    """Counts of the content that was removed, or would be."""

    trajectories: int
    derived: int
    """The number of these rows that were not requested: each was made from a requested row."""
    tasks: int
    """The number of tasks that no other row has: their payloads are removed too."""
    updates: int
    """Committed draws of these rows."""
    held_out: int
    """Episodes of evaluations."""
    sessions: int
    """Agents' sessions under way."""
    shared_tasks: list[str]
    """Tasks whose payloads stay, for other rows or evaluations have them, or workers still need them."""
    copies: list[str]
    """Rows that stay although they have the same tokens, or are parents of removed rows."""


def forget(connection: sa.Connection, rows: sa.ColumnElement[bool], of_run: str | None, *, dry_run: bool) -> Forgotten:
    """Remove the content of rows, of rows made from them, and of tasks that no other row has. `of_run` names a run, or
    ALL_RUNS: its evaluation episodes and its open sessions are removed too."""
    asked = connection.scalars(sa.select(_rows.id).where(rows)).all()
    facts = [_rows.id, _rows.task, _rows.parent, _rows.content_hash]
    gone = list(selected(connection, facts, _rows.id, _with_derived(connection, asked)))
    ids, by_task = [row.id for row in gone], Counter(row.task for row in gone)
    beyond = [(of, sa.true() if of_run == ALL_RUNS else of.c.run == of_run) for of in (held_out, schema.sessions)]
    evaluated = connection.scalars(sa.select(held_out.c.task).where(beyond[0][1]).distinct()).all()
    shared = _shared_tasks(connection, by_task, ~beyond[0][1])
    counts = [sa.select(sa.func.count()).select_from(table).where(which) for table, which in beyond]
    found = Forgotten(
        trajectories=len(ids),
        derived=len(ids) - len(asked),
        tasks=len(by_task) - len(shared),
        updates=sum(row.state == COMMITTED for row in selected(connection, [draws.c.state], draws.c.trajectory, ids)),
        held_out=connection.scalar(counts[0]) or 0,
        sessions=connection.scalar(counts[1]) or 0,
        shared_tasks=shared,
        copies=_copies(connection, gone),
    )
    if not dry_run:
        for table, which in beyond:
            remove(connection, table, which)
        _remove_unused_tasks(connection, evaluated)
        # Answers of the tasks' tools may hold the content that is to be forgotten.
        forget_observations(connection, list(by_task))
        reclaim(connection, ids, FORGOTTEN)
    return found


def _with_derived(connection: sa.Connection, ids: Sequence[str]) -> list[str]:
    """The rows, and all rows made from them directly or through other rows. Deleted rows are included."""
    found = newest = set(ids)
    while newest:
        made = (selected(connection, [of.c.id], of.c.parent, list(newest)) for of in (trajectories, reclaimed))
        newest = {row.id for each in made for row in each} - found
        found = found | newest
    return sorted(found)


def _shared_tasks(connection: sa.Connection, rows: Counter[str], evaluated: sa.ColumnElement[bool]) -> list[str]:
    """Tasks that other rows or `evaluated` episodes have too, or that workers still need. `rows` counts the rows to
    remove by task."""
    task, closed = tickets.c.task, tickets.c.closed_at
    stored = Counter(row.task for row in selected(connection, [_rows.task], _rows.task, list(rows)))
    wanted = {row.task for row in selected(connection, [task, closed], task, list(rows)) if row.closed_at is None}
    wanted |= {*connection.scalars(sa.select(held_out.c.task).where(evaluated))}
    return sorted(task for task in rows if stored[task] > rows[task] or task in wanted)


def _copies(connection: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[str]:
    """Other rows that are the parent of one of these rows, or have the same tokens as one."""
    sought = {_rows.id: {row.parent for row in rows}, _rows.content_hash: {row.content_hash for row in rows}}
    found = (selected(connection, [_rows.id], key, list(of - {None, ""})) for key, of in sought.items())
    return sorted({row.id for each in found for row in each}.difference(row.id for row in rows))


def reclaim(connection: sa.Connection, ids: Sequence[str], reason: str | None = None) -> None:
    """Delete rows, and keep their facts in `reclaimed`. `reason` replaces their state reason; None keeps it."""
    if not ids:
        return
    number = next_number(connection, "changed")
    why = _rows.state_reason if reason is None else sa.literal(reason)
    columns = [*(_rows[name] for name in FACTS), sa.func.coalesce(why, EVICTED), sa.literal(number, sa.BigInteger)]
    for chunk in chunked(ids):
        mine = _rows.id.in_(chunk)
        named = connection.scalars(sa.select(_rows.task).where(mine).distinct()).all()
        left = reclaimed.insert().from_select([*FACTS, "state_reason", "changed"], sa.select(*columns).where(mine))
        connection.execute(left)
        remove(connection, trajectories, mine)
        _remove_unused_tasks(connection, named)


def _remove_unused_tasks(connection: sa.Connection, hashes: Sequence[str]) -> None:
    """Remove the payloads and tools of those tasks that no row and no evaluation has and no worker needs. A task that
    is stored again gets them again."""
    used = sa.exists().where(_rows.task == tasks.c.hash) | tasks.c.hash.in_(sa.select(held_out.c.task))
    # A worker still needs the task.
    wanted = sa.exists().where(tickets.c.task == tasks.c.hash, tickets.c.closed_at.is_(None))
    for chunk in chunked(hashes):
        unused = sa.and_(tasks.c.hash.in_(chunk), ~used, ~wanted)
        forget_observations(connection, connection.scalars(sa.select(tasks.c.hash).where(unused)).all())
        if connection.dialect.name == "sqlite":
            # An updated row that shrinks leaves space in its page that is never filled again; a replaced row does not.
            left = {"payload": sa.literal(REMOVED_TASK), "tools": sa.null()}
            values = sa.select(*(left.get(column.key, column) for column in tasks.c)).where(unused)
            replaced = tasks.insert().prefix_with("OR REPLACE").from_select([*tasks.c], values)
            connection.execute(replaced)
        else:
            connection.execute(tasks.update().where(unused).values(payload=REMOVED_TASK, tools=None))


def reasons(connection: sa.Connection, ids: Sequence[str]) -> dict[str, str]:
    """The reasons why rows were deleted, by id. Ids of rows that were not deleted are left out."""
    return {row.id: row.state_reason for row in selected(connection, [_left.id, _left.state_reason], _left.id, ids)}


def reclaimed_between(connection: sa.Connection, since: int, newest: int) -> list[str]:
    """The rows that were deleted after change `since`, up to change `newest`."""
    return list(connection.scalars(sa.select(_left.id).where(_left.changed > since, _left.changed <= newest)))


def _either(name: str) -> sa.ColumnElement[Any]:
    return sa.func.coalesce(_rows[name], _left[name], type_=_rows[name].type)


COLLECTED = (
    sa.func.coalesce(_rows.run, groups.c.run).label("collected_run"),
    sa.func.coalesce(_rows.iteration, groups.c.iteration).label("collected_iteration"),
    sa.func.coalesce(_rows.task, groups.c.task).label("task"),
    sa.func.coalesce(_rows.state, EVICTED).label("state"),
    _either("advantage").label("stored_advantage"),
    *(
        _either(name).label(name)
        for name in ("source", "group", "reward", "success", "num_action_tokens", "policy_version_min", "state_reason")
    ),
)
"""The facts that a row was collected with, by the names of lineage questions, for stored and deleted rows."""

IS_KNOWN = sa.func.coalesce(_rows.id, _left.id).is_not(None)


def with_collected(named: sa.FromClause, id: sa.ColumnElement[str]) -> sa.Join:
    """`named`, joined to the tables that COLLECTED and FACTS read, for the rows whose ids it holds."""
    joined = named.outerjoin(trajectories, _rows.id == id).outerjoin(reclaimed, _left.id == id)
    return joined.outerjoin(groups, groups.c.id == _either("group"))
