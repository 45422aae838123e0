"""Removing the content of rows for good.

What is left of any evicted row stays (`replay.storage.reclaimed`), so that lineage still names the updates it fed:
weights that learned from it are not changed by forgetting it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sqlalchemy as sa

from replay.records import COMMITTED, FORGOTTEN
from replay.storage.collecting import held_out_rows
from replay.storage.collecting.observations import forget_observations
from replay.storage.format.rows import chunked
from replay.storage.format.schema import draws, messages, trajectories
from replay.storage.reclaimed import reclaim

_rows = trajectories.c


ALL_RUNS = "*"
HeldOutOf = str | None
"""A run's id, or `ALL_RUNS`; None: of none."""


@dataclass(frozen=True)
class Forgotten:
    """How much content was removed, or would be."""

    trajectories: int
    messages: int
    tasks: int
    """Those that no other row has: their payloads go with the rows."""
    updates: int
    """Committed draws of these rows."""
    held_out: int = 0
    """Episodes of evaluations."""


def forget(
    connection: sa.Connection,
    rows: sa.ColumnElement[bool],
    held_out: HeldOutOf = None,
    *,
    dry_run: bool = False,
) -> Forgotten:
    """Remove the content of these rows, and of tasks that no other row has; what is left of evicted ones has none.

    And the episodes of evaluations of the run `held_out`, or of all runs.
    """
    ids = list(connection.scalars(sa.select(_rows.id).where(rows)))
    run = None if held_out == ALL_RUNS else held_out
    evaluated = 0 if held_out is None else held_out_rows.count(connection, run)
    counted = replace(_count(connection, ids), held_out=evaluated)
    if not dry_run:
        if evaluated:
            held_out_rows.remove(connection, run)
        for chunk in chunked(ids):
            # Its tools' answers may be among them.
            named = connection.scalars(sa.select(_rows.task).where(_rows.id.in_(chunk)).distinct())
            forget_observations(connection, named.all())
        reclaim(connection, ids, FORGOTTEN)
    return counted


def _count(connection: sa.Connection, ids: Sequence[str]) -> Forgotten:
    said = used = 0
    mine: Counter[str] = Counter()
    for chunk in chunked(ids):
        of_these = sa.select(sa.func.sum(messages.c.num_messages)).where(messages.c.trajectory.in_(chunk))
        said += int(connection.scalar(of_these) or 0)
        committed = sa.and_(draws.c.trajectory.in_(chunk), draws.c.state == COMMITTED)
        used += connection.scalar(sa.select(sa.func.count()).where(committed)) or 0
        mine.update(connection.scalars(sa.select(_rows.task).where(_rows.id.in_(chunk))))
    orphaned = 0
    for chunk in chunked(list(mine)):
        stored = sa.select(_rows.task, sa.func.count()).where(_rows.task.in_(chunk)).group_by(_rows.task)
        orphaned += sum(mine[task] == number for task, number in connection.execute(stored))
    return Forgotten(len(ids), said, orphaned, used)
