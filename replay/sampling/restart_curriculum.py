"""A curriculum of restarts: new episodes continue stored successes, at first near their ends, later near their starts.

Example: a success has four replies. The first group that continues it keeps three of them and makes the last one. If
half of the group succeeds, the next group keeps two.
"""

from typing import Any

import sqlalchemy as sa

from replay.records import ELIGIBLE, ORPHANED, RESTART
from replay.storage.format.schema import groups, reclaimed, segments, trajectories
from replay.storage.format.views import COUNTS_AS_ATTEMPTS, was_orphaned

_rows = trajectories.c


def replies_to_keep(replies: int, latest: tuple[int, float] | None) -> int:
    """Return how many of a success's `replies` the next group that continues it keeps. 0: the success is done.

    `latest` has the number of replies that the success's latest group kept, and the share of its members that
    succeeded. None: no group has continued the success yet; the first one has one reply to make. If at least half
    succeeded, the next group keeps one reply less. If none succeeded, it keeps one more, but never all replies.
    Otherwise it keeps as many. This is the reverse curriculum of R3 (Xi et al. 2024, arXiv 2402.05808), at the pace
    of each success.
    """
    if latest is None:
        return replies - 1
    kept, succeeded = latest
    if succeeded >= 0.5:
        return kept - 1
    return kept if succeeded else min(kept + 1, replies - 1)


def restartable(connection: sa.Connection, run: str) -> list[tuple[str, int]]:
    """Return the ids of the run's successes that episodes can continue, and how many replies to keep of each.

    Each task gives its latest success that began at the start, unless that success is done. Tasks whose episodes from
    the start succeed least often come first; ties go to the latest success. Rows of several training sequences are left
    out, because the policy's context was rewritten in them.
    """
    attempts = sa.func.sum(groups.c.size * groups.c.success_rate) / sa.func.sum(groups.c.size)
    rates = sa.select(groups.c.task, attempts.label("rate")).where(groups.c.run == run, COUNTS_AS_ATTEMPTS)
    by_task = rates.group_by(groups.c.task).subquery()
    newest = (_rows.iteration.desc(), _rows.slot, _rows.id)
    is_latest = sa.func.row_number().over(partition_by=_rows.task, order_by=newest) == 1
    rewritten = sa.exists().where(segments.c.trajectory == _rows.id, segments.c.position > 0)
    mine = (_rows.run == run, _rows.success, _rows.source == "self", _rows.state == ELIGIBLE, ~rewritten)
    columns = (_rows.id, _rows.task, _rows.num_turns, _rows.iteration, _rows.slot, is_latest.label("is_latest"))
    found = sa.select(*columns).where(*mine).subquery()
    asked = sa.select(found.c.id, found.c.num_turns).join(by_task, by_task.c.task == found.c.task)
    order = (by_task.c.rate, found.c.iteration.desc(), found.c.slot, found.c.id)
    latest = _latest_groups(connection, run)
    successes = connection.execute(asked.where(found.c.is_latest).order_by(*order)).all()
    kept = ((row.id, replies_to_keep(row.num_turns, latest.get(row.id))) for row in successes)
    return [(id, count) for id, count in kept if count > 0]


def _latest_groups(connection: sa.Connection, run: str) -> dict[str, tuple[int, float]]:
    """Return, by the id of a success, how many replies the latest group that continued it kept and its success rate."""

    def begun(table: sa.Table) -> sa.Select[Any]:
        columns = (table.c.parent, table.c.kept_turns, groups.c.success_rate, groups.c.iteration)
        joined = sa.select(*columns).join_from(table, groups, groups.c.id == table.c.group)
        counts = sa.or_(table.c.state_reason.is_(None), ~was_orphaned(table.c.state_reason))
        return joined.where(groups.c.run == run, table.c.source == RESTART, counts)

    rows = sa.union_all(begun(trajectories).where(_rows.state != ORPHANED), begun(reclaimed)).order_by("iteration")
    return {row.parent: (row.kept_turns, row.success_rate) for row in connection.execute(rows)}
