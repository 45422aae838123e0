"""What is left of a row that is evicted for good or forgotten: who it was, how it ended, and why it went. Draws name it
for ever, so that lineage still says which updates it fed; the payload of a task goes with its last row."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from replay.records import COMMITTED, EVICTED, FORGOTTEN, REMOVED_TASK
from replay.storage.collecting.never_drawn import forget_observations, remove_episodes
from replay.storage.counters import next_number
from replay.storage.format import schema
from replay.storage.format.rows import chunked
from replay.storage.format.schema import FACTS, draws, groups, messages, reclaimed, tasks, tickets, trajectories
from replay.storage.sessions import remove_sessions
from replay.storage.statements import selected

_rows, _left = trajectories.c, reclaimed.c


@dataclass(frozen=True)
class Forgotten:
    """How much content was removed, or would be."""

    trajectories: int
    messages: int
    tasks: int
    """Tasks that no other row has: their payloads go with the rows."""
    updates: int
    """Committed draws of these rows."""
    held_out: int
    """Episodes of evaluations."""
    sessions: int
    """Agents' sessions under way."""


def forget(
    connection: sa.Connection, rows: sa.ColumnElement[bool], held_out: str | None = None, *, dry_run: bool = False
) -> Forgotten:
    """Remove the content of these rows, and of tasks that no other row has. `held_out`: a run whose episodes of
    evaluations and sessions under way go too, or ALL_RUNS."""
    ids = list(connection.scalars(sa.select(_rows.id).where(rows)))
    said = used = 0
    mine: Counter[str] = Counter()
    for chunk in chunked(ids):
        of_these = sa.select(sa.func.sum(messages.c.num_messages)).where(messages.c.trajectory.in_(chunk))
        said += int(connection.scalar(of_these) or 0)
        committed = draws.c.trajectory.in_(chunk) & (draws.c.state == COMMITTED)
        used += connection.scalar(sa.select(sa.func.count()).where(committed)) or 0
        mine.update(connection.scalars(sa.select(_rows.task).where(_rows.id.in_(chunk))))
    emptied = 0
    for chunk in chunked(list(mine)):
        stored = sa.select(_rows.task, sa.func.count()).where(_rows.task.in_(chunk)).group_by(_rows.task)
        emptied += sum(mine[task] == number for task, number in connection.execute(stored))
    evaluated = 0 if held_out is None else remove_episodes(connection, held_out, dry_run=dry_run)
    under_way = 0 if held_out is None else remove_sessions(connection, held_out, dry_run=dry_run)
    if not dry_run:
        # Its tools' answers may be among what is to be forgotten.
        forget_observations(connection, list(mine))
        reclaim(connection, ids, FORGOTTEN)
    return Forgotten(len(ids), said, emptied, used, evaluated, under_way)


def reclaim(connection: sa.Connection, ids: Sequence[str], reason: str | None = None) -> None:
    """Delete rows but for what is left of them. Their state's reason becomes `reason`, or stays what it is."""
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
        for table in (schema.segments, schema.nodes, messages, schema.token_scores, schema.trajectory_labels):
            connection.execute(table.delete().where(table.c.trajectory.in_(chunk)))
        connection.execute(trajectories.delete().where(mine))
        _remove_unused_tasks(connection, named)


def _remove_unused_tasks(connection: sa.Connection, hashes: Sequence[str]) -> None:
    """The payloads of those tasks of which no row is stored or expected. One that comes again is known again."""
    used = sa.exists().where(_rows.task == tasks.c.hash)
    # Workers are still to be given it.
    wanted = sa.exists().where(tickets.c.task == tasks.c.hash, tickets.c.closed_at.is_(None))
    for chunk in chunked(hashes):
        unused = sa.and_(tasks.c.hash.in_(chunk), ~used, ~wanted)
        forget_observations(connection, connection.scalars(sa.select(tasks.c.hash).where(unused)).all())
        if connection.dialect.name == "sqlite":
            # A row that shrinks keeps its place in a file, and the page around it is never filled again.
            values = sa.select(tasks.c.hash, tasks.c.environment, sa.literal(REMOVED_TASK)).where(unused)
            replaced = tasks.insert().prefix_with("OR REPLACE").from_select([*tasks.c], values)
            connection.execute(replaced)
        else:
            connection.execute(tasks.update().where(unused).values(payload=REMOVED_TASK))


def reasons(connection: sa.Connection, ids: Sequence[str]) -> dict[str, str]:
    """Why they went, by id, of those that did."""
    return {row.id: row.state_reason for row in selected(connection, [_left.id, _left.state_reason], _left.id, ids)}


def reclaimed_between(connection: sa.Connection, since: int, newest: int) -> list[str]:
    """Rows that went after change `since`, up to change `newest`."""
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
"""What a row was collected with, by the names that questions of lineage give it, whether it is stored or reclaimed."""

IS_KNOWN = sa.func.coalesce(_rows.id, _left.id).is_not(None)


def with_collected(named: sa.FromClause, id: sa.ColumnElement[str]) -> sa.Join:
    """`named` with what COLLECTED and FACTS are read from, for the rows whose ids it has."""
    joined = named.outerjoin(trajectories, _rows.id == id).outerjoin(reclaimed, _left.id == id)
    return joined.outerjoin(groups, groups.c.id == _either("group"))
