"""All tasks beside each other: how often each was tried, what came of it, and how far its rows had drifted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from replay.queries.excerpts import NONE, excerpts_of
from replay.queries.filters.query import QueryResult
from replay.queries.summary import mean
from replay.queries.tasks.task import TRIED, total
from replay.records import COMMITTED, ELIGIBLE, REPLAY
from replay.sampling.samplers import successes
from replay.storage.format import schema
from replay.storage.format.rows import chunked
from replay.storage.format.schema import draws, groups, tasks
from replay.storage.reclaimed import with_collected
from replay.storage.statements import selected
from replay.store import ReplayStore

_rows = schema.trajectories.c


class TaskSort(StrEnum):
    """Which tasks come first."""

    unsolved = "unsolved"
    """Those that never succeeded, of these the most tried; then by the share of their successes."""
    replayed = "replayed"
    drift = "drift"
    attempts = "attempts"
    last = "last"


def task_list(
    store: ReplayStore, run: str | None = None, *, sort: TaskSort = TaskSort.unsolved, limit: int = 50
) -> QueryResult:
    """How many tasks were tried and how many of them never solved, and `limit` of them in order.

    Attempts are counted as `queries.task` counts them. `replayed`: draws of its rows that fed updates, of those that
    were evicted since too, with their mean and their largest `drift`; `last_iteration`: the newest that tried it.
    """
    with store.reading() as connection:
        found = _tried(connection, run)
        rows = sorted(found.values(), key=_ORDERS[sort])
        shown = _named(connection, rows[:limit], run)
    return {
        "run": run,
        "sort": sort.value,
        "tasks": len(rows),
        "never_solved": sum(row["successes"] == 0 for row in rows),
        "rows": shown,
    }


def _by_difficulty(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["successes"] / row["attempts"], -row["attempts"]


def _falling(*names: str) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """The greatest first, and what is unknown last."""
    return lambda row: tuple(part for name in names for part in (row[name] is None, -(row[name] or 0)))


_KEYS: dict[TaskSort, Callable[[Mapping[str, Any]], tuple[Any, ...]]] = {
    TaskSort.unsolved: _by_difficulty,
    TaskSort.replayed: _falling("replayed"),
    TaskSort.drift: _falling("drift_mean", "drift_max"),
    TaskSort.attempts: _falling("attempts"),
    TaskSort.last: _falling("last_iteration"),
}


def _with_hash(key: Callable[[Mapping[str, Any]], tuple[Any, ...]]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    return lambda row: (*key(row), row["hash"])


_ORDERS = {sort: _with_hash(key) for sort, key in _KEYS.items()}


_UNTRIED: QueryResult = {
    **dict.fromkeys(("attempts", "successes", "last_iteration", "eligible", "replayed"), 0),
    **dict.fromkeys(("drift_mean", "drift_max")),
}


def _tried(connection: sa.Connection, run: str | None) -> dict[str, QueryResult]:
    """By hash, of every task that was tried at least once."""
    found: dict[str, QueryResult] = {}
    for row in (*_stored(connection, run), *_gone(connection, run)):
        counted = found.setdefault(row["hash"], {"hash": row["hash"], **_UNTRIED})
        for name in ("attempts", "successes", "eligible"):
            counted[name] += row[name]
        counted["last_iteration"] = max(counted["last_iteration"], row["last_iteration"])
    for row in _drawn(connection, run):
        if row["hash"] in found:
            found[row["hash"]] |= row
    return found


def _stored(connection: sa.Connection, run: str | None) -> list[QueryResult]:
    query = sa.select(
        _rows.task.label("hash"),
        sa.func.count().label("attempts"),
        total(_rows.success).label("successes"),
        total(_rows.state == ELIGIBLE).label("eligible"),
        sa.func.max(_rows.iteration).label("last_iteration"),
    ).where(TRIED, sa.true() if run is None else _rows.run == run)
    return [dict(row) for row in connection.execute(query.group_by(_rows.task)).mappings()]


def _gone(connection: sa.Connection, run: str | None) -> Iterable[QueryResult]:
    """Groups of which no row is stored any more, one by one."""
    columns = (groups.c.task, groups.c.iteration, groups.c.size, groups.c.success_rate)
    query = sa.select(*columns).where(~sa.exists().where(_rows.group == groups.c.id))
    if run is not None:
        query = query.where(groups.c.run == run)
    for row in connection.execute(query):
        counts = {"attempts": row.size, "successes": int(successes(row.success_rate, row.size)), "eligible": 0}
        yield {"hash": row.task, **counts, "last_iteration": row.iteration}


def _drawn(connection: sa.Connection, run: str | None) -> list[QueryResult]:
    query = (
        sa.select(
            groups.c.task.label("hash"),
            sa.func.count().label("replayed"),
            mean(draws.c.drift_mean).label("drift_mean"),
            sa.func.max(draws.c.drift_max).label("drift_max"),
        )
        .select_from(with_collected(draws, draws.c.trajectory))
        .where(draws.c.state == COMMITTED, draws.c.stream == REPLAY, groups.c.task.is_not(None))
        .group_by(groups.c.task)
    )
    query = query if run is None else query.where(groups.c.run == run)
    return [dict(row) for row in connection.execute(query).mappings()]


def _named(connection: sa.Connection, rows: Sequence[QueryResult], run: str | None) -> list[QueryResult]:
    """With their environments, and what the newest stored attempt was asked."""
    hashes = [row["hash"] for row in rows]
    environments = {row.hash: row.environment for row in selected(connection, [*tasks.c], tasks.c.hash, hashes)}
    newest = _newest(connection, hashes, run)
    said = excerpts_of(connection, list(newest.values()))
    return [
        {
            **row,
            "environment": environments.get(row["hash"]),
            "prompt": said.get(newest.get(row["hash"], ""), NONE)["prompt"],
        }
        for row in rows
    ]


def _newest(connection: sa.Connection, hashes: Sequence[str], run: str | None) -> dict[str, str]:
    """The id of each one's newest stored attempt."""
    order = (_rows.iteration.desc(), _rows.run, _rows.slot, _rows.id)
    place = sa.func.row_number().over(partition_by=_rows.task, order_by=order).label("place")
    found: dict[str, str] = {}
    for chunk in chunked(hashes):
        mine = sa.select(_rows.task, _rows.id, place).where(TRIED, _rows.task.in_(chunk))
        ranked = (mine if run is None else mine.where(_rows.run == run)).subquery()
        query = sa.select(ranked.c.task, ranked.c.id).where(ranked.c.place == 1)
        found |= {row.task: row.id for row in connection.execute(query)}
    return found
