"""One task: how it was tried over time, what is stored of it, how hard it has been; and the list of all tasks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from replay.errors import ReplayError
from replay.questions.filters.query import QueryResult, run_is
from replay.questions.summary import mean
from replay.questions.trajectory import NONE, excerpts_of, opening
from replay.records import COMMITTED, ELIGIBLE, ORPHANED, REMOVED_TASK, REPLAY
from replay.sampling.samplers import successes
from replay.storage.format import schema
from replay.storage.format.column_types import ExactText
from replay.storage.format.encoding import BlobError
from replay.storage.format.message_json import messages_of
from replay.storage.format.rows import chunked
from replay.storage.format.schema import draws, groups, iterations, messages, tasks
from replay.storage.reclaimed import with_collected
from replay.storage.statements import selected
from replay.store import ReplayStore

_rows = schema.trajectories.c
_MOST_GROUPS = 200
"""The newest are listed one by one; of the others there is only what they add up to."""
_LISTED = (
    *(_rows[name] for name in ("id", "run", "iteration", "slot", "member", "policy_version_min", "reward", "success")),
    *(_rows[name] for name in ("advantage", "num_turns", "num_tokens", "stop_reason", "error_kind", "state")),
    _rows.uses,
    _rows.group.label("group"),
)


def _count_of(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    return sa.cast(sa.func.coalesce(sa.func.sum(sa.case((condition, 1), else_=0)), 0), sa.BigInteger)


_TRIED = _rows.state != ORPHANED
"""Attempts of iterations that were undone count for nothing; they are listed with their state."""
_COUNTS = (
    sa.func.count().label("attempts"),
    _count_of(_rows.success).label("successes"),
    sa.func.avg(_rows.reward).label("reward_mean"),
)


def task(
    store: ReplayStore, hash_prefix: str, run: str | None = None, *, after: str | None = None, limit: int = 50
) -> QueryResult:
    """What is known of one task, in one run or in all of the database.

    Attempts are rows that are stored, and the members of groups of which no row is any more: these count in `groups`
    and in the totals, as they were collected. `versions`: success of stored rows by the policies that tried it.
    `difficulty`: groups by successes among so many members. `trajectories`: newest first, `limit` of them, those behind
    the row `after`; `next` is the last one's id if there are more.
    """
    with store.reading() as connection:
        found = _find(connection, hash_prefix, store.url)
        mine = _rows.task == found["hash"]
        if run is not None:
            # As an expression: rows of a task are few, and the index of a run's rows would be read instead.
            mine = mine & (_rows.run.concat("") == run)
        tried, gone = _groups_of(connection, found["hash"], run, mine)
        listed = _listed(connection, mine, after=after, limit=limit)
        return {
            **found,
            "run": run,
            "prompt": _prompt(connection, mine),
            **_with_gone(_totals(connection, mine), gone),
            "replayed": sum(group["replayed"] for group in tried),
            "versions": _versions(connection, mine),
            "groups_in_all": len(tried),
            "groups": tried[:_MOST_GROUPS],
            "difficulty": _difficulty(tried),
            "trajectories": listed[:limit],
            "next": listed[limit - 1]["id"] if len(listed) > limit else None,
        }


def _find(connection: sa.Connection, hash_prefix: str, url: str) -> QueryResult:
    begins = sa.func.substr(tasks.c.hash, 1, len(hash_prefix), type_=ExactText) == hash_prefix
    rows = connection.execute(sa.select(tasks).where(tasks.c.hash == hash_prefix)).mappings().all()
    rows = rows or connection.execute(sa.select(tasks).where(begins).order_by(tasks.c.hash).limit(2)).mappings().all()
    if not hash_prefix or len(rows) != 1:
        which = "none" if not (rows and hash_prefix) else "more than one: " + ", ".join(row["hash"] for row in rows)
        raise ReplayError(
            f"HASH must be the beginning of one task's hash in {url}, got {hash_prefix!r}, which begins {which}. "
            "See: agentloop replay ls --json"
        )
    (row,) = rows
    removed = row["payload"] == REMOVED_TASK
    return {**row, "payload": None if removed else json.loads(row["payload"]), "removed": removed}


def _totals(connection: sa.Connection, mine: sa.ColumnElement[bool]) -> QueryResult:
    def of_tried(value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        return sa.case((_TRIED, value))

    query = sa.select(
        _count_of(_TRIED).label("attempts"),
        _count_of(_TRIED & _rows.success).label("successes"),
        sa.func.avg(of_tried(_rows.reward)).label("reward_mean"),
        _count_of(_rows.state == ELIGIBLE).label("eligible"),
        sa.func.min(of_tried(_rows.iteration)).label("first_iteration"),
        sa.func.max(of_tried(_rows.iteration)).label("last_iteration"),
        sa.func.count(sa.distinct(of_tried(_rows.run))).label("runs"),
        _count_of(~_TRIED).label("orphaned"),
    )
    return dict(connection.execute(query.where(mine)).mappings().one())


def _prompt(connection: sa.Connection, mine: sa.ColumnElement[bool]) -> list[QueryResult] | None:
    """What the newest attempt that still has its messages was asked: all before the first reply."""
    columns = (messages.c.num_messages, messages.c.said, messages.c.checksum)
    query = sa.select(*columns).join_from(schema.trajectories, messages, _rows.id == messages.c.trajectory).where(mine)
    row = connection.execute(query.order_by(*_NEWEST_FIRST).limit(1)).one_or_none()
    if row is None:
        return None
    try:
        asked = opening(messages_of(*row))
        return [{"author": each.author, "role": each.role, "content": each.content} for each in asked]
    except BlobError:
        return None


def _versions(connection: sa.Connection, mine: sa.ColumnElement[bool]) -> list[QueryResult]:
    """Success by run and policy."""
    version = _rows.policy_version_min
    query = sa.select(_rows.run, version.label("version"), *_COUNTS).where(mine, _TRIED).group_by(_rows.run, version)
    return [dict(row) for row in connection.execute(query.order_by(_rows.run, version)).mappings()]


_NEWEST_FIRST = (_rows.iteration.desc(), _rows.run, _rows.slot, _rows.id)
_GROUP = ("id", "run", "iteration", "size", "reward_mean", "reward_std", "success_rate")
# An import's iteration was another database's; a live run's newest may not be committed yet.
_MADE = (
    sa.exists()
    .where(iterations.c.run == groups.c.run, iterations.c.iteration == groups.c.iteration)
    .correlate(groups)
    .label("committed")
)


def _groups_of(
    connection: sa.Connection, task: str, run: str | None, mine: sa.ColumnElement[bool]
) -> tuple[list[QueryResult], list[QueryResult]]:
    """The task's groups, the newest first, and those of them of which no row is stored any more.

    A group that a resume undid is there once its rows are gone.
    """
    left = (
        sa.select(_rows.group.label("id"), _count_of(_rows.state == ELIGIBLE).label("eligible"))
        .where(mine, _TRIED)
        .group_by(_rows.group)
        .subquery()
    )
    is_gone = ~sa.exists().where(_rows.group == groups.c.id)
    eligible = sa.func.coalesce(left.c.eligible, 0).label("eligible")
    query = sa.select(*(groups.c[name] for name in _GROUP), eligible, _MADE, left.c.id.label("left"))
    query = query.outerjoin(left, left.c.id == groups.c.id)
    query = query.where(groups.c.task == task, left.c.id.is_not(None) | is_gone, run_is(run, groups.c.run))
    drawn = (
        sa.select(_rows.group, sa.func.count())
        .join_from(schema.trajectories, draws, draws.c.trajectory == _rows.id)
        .where(mine, _TRIED, draws.c.state == COMMITTED, draws.c.stream == REPLAY)
        .group_by(_rows.group)
    )
    replayed = {row[0]: row[1] for row in connection.execute(drawn)}
    tried, gone = [], []
    order = (groups.c.iteration.desc(), left.c.id.is_(None), groups.c.run, groups.c.id)
    for found in connection.execute(query.order_by(*order)).mappings():
        row = dict(found)
        is_left = row.pop("left") is not None
        made = {"committed": bool(row["committed"]), "successes": int(successes(row["success_rate"], row["size"]))}
        tried.append({**row, **made, "replayed": replayed.get(row["id"], 0)})
        gone += [] if is_left else tried[-1:]
    return tried, gone


def _with_gone(totals: QueryResult, gone: Sequence[QueryResult]) -> QueryResult:
    if not gone:
        return totals
    members = sum(group["size"] for group in gone)
    reward = sum(group["size"] * group["reward_mean"] for group in gone)
    attempts = totals["attempts"] + members
    times = [group["iteration"] for group in gone]
    times += [time for time in (totals["first_iteration"], totals["last_iteration"]) if time is not None]
    return {
        **totals,
        "attempts": attempts,
        "successes": totals["successes"] + sum(group["successes"] for group in gone),
        "reward_mean": ((totals["reward_mean"] or 0.0) * totals["attempts"] + reward) / attempts if attempts else None,
        "first_iteration": min(times),
        "last_iteration": max(times),
        "runs": max(totals["runs"], len({group["run"] for group in gone})),
    }


def _difficulty(tried: Sequence[Mapping[str, Any]]) -> list[QueryResult]:
    """By (successes, size): groups, rows that can be drawn, and draws; `newest`: where the last group fell."""
    buckets: dict[tuple[int, int], QueryResult] = {}
    for group in tried:
        new = {"size": group["size"], "successes": group["successes"], "groups": 0, "newest": not buckets}
        bucket = buckets.setdefault((group["size"], group["successes"]), {**new, "eligible": 0, "replayed": 0})
        bucket["groups"] += 1
        bucket["eligible"] += group["eligible"]
        bucket["replayed"] += group["replayed"]
    return [buckets[key] for key in sorted(buckets)]


def _listed(
    connection: sa.Connection, mine: sa.ColumnElement[bool], *, after: str | None, limit: int
) -> list[QueryResult]:
    """One more than the limit where there are more."""
    query = sa.select(*_LISTED).where(mine)
    if after is not None:
        key = sa.select(_rows.iteration, _rows.run, _rows.slot, _rows.id).where(mine, _rows.id == after)
        place = connection.execute(key).one_or_none()
        if place is None:
            raise ReplayError(f"after must be the id of one of the task's trajectories, got {after!r}.")
        iteration, *rest = place
        later = sa.tuple_(_rows.run, _rows.slot, _rows.id) > sa.tuple_(*rest)
        query = query.where((_rows.iteration < iteration) | ((_rows.iteration == iteration) & later))
    query = query.order_by(*_NEWEST_FIRST).limit(limit + 1)
    return [dict(row) for row in connection.execute(query).mappings()]


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

    Attempts are counted as `questions.task` counts them. `replayed`: draws of its rows that fed updates, of those that
    were evicted since too, with their mean and their largest `drift`; `last_iteration`: the newest that tried it.
    """
    with store.reading() as connection:
        found = _tried(connection, run)
        rows = sorted(found.values(), key=lambda row: _order(row, sort))
        shown = _named(connection, rows[:limit], run)
    return {
        "run": run,
        "sort": sort.value,
        "tasks": len(rows),
        "never_solved": sum(row["successes"] == 0 for row in rows),
        "rows": shown,
    }


def _order(row: Mapping[str, Any], sort: TaskSort) -> tuple[Any, ...]:
    """The greatest first, and what is unknown last."""
    if sort is TaskSort.unsolved:
        return row["successes"] / row["attempts"], -row["attempts"], row["hash"]
    return (*((row[name] is None, -(row[name] or 0)) for name in _COLUMNS[sort]), row["hash"])


_COLUMNS = {
    TaskSort.replayed: ("replayed",),
    TaskSort.drift: ("drift_mean", "drift_max"),
    TaskSort.attempts: ("attempts",),
    TaskSort.last: ("last_iteration",),
}
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
        _count_of(_rows.success).label("successes"),
        _count_of(_rows.state == ELIGIBLE).label("eligible"),
        sa.func.max(_rows.iteration).label("last_iteration"),
    ).where(_TRIED, run_is(run, _rows.run))
    return [dict(row) for row in connection.execute(query.group_by(_rows.task)).mappings()]


def _gone(connection: sa.Connection, run: str | None) -> Iterable[QueryResult]:
    """Groups of which no row is stored any more, one by one."""
    columns = (groups.c.task, groups.c.iteration, groups.c.size, groups.c.success_rate)
    query = sa.select(*columns).where(~sa.exists().where(_rows.group == groups.c.id), run_is(run, groups.c.run))
    for row in connection.execute(query):
        counts = {"attempts": row.size, "successes": int(successes(row.success_rate, row.size)), "eligible": 0}
        yield {"hash": row.task, **counts, "last_iteration": row.iteration}


def _drawn(connection: sa.Connection, run: str | None) -> list[QueryResult]:
    query = sa.select(
        groups.c.task.label("hash"),
        sa.func.count().label("replayed"),
        mean(draws.c.drift_mean).label("drift_mean"),
        sa.func.max(draws.c.drift_max).label("drift_max"),
    ).select_from(with_collected(draws, draws.c.trajectory))
    used = (draws.c.state == COMMITTED) & (draws.c.stream == REPLAY) & groups.c.task.is_not(None)
    found = connection.execute(query.where(used, run_is(run, groups.c.run)).group_by(groups.c.task))
    return [dict(row) for row in found.mappings()]


def _named(connection: sa.Connection, rows: Sequence[QueryResult], run: str | None) -> list[QueryResult]:
    """With their environments, and what the newest stored attempt was asked."""
    hashes = [row["hash"] for row in rows]
    environments = {row.hash: row.environment for row in selected(connection, [*tasks.c], tasks.c.hash, hashes)}
    newest = _newest(connection, hashes, run)
    said = excerpts_of(connection, list(newest.values()))
    for row in rows:
        row["environment"] = environments.get(row["hash"])
        row["prompt"] = said.get(newest.get(row["hash"], ""), NONE)["prompt"]
    return list(rows)


def _newest(connection: sa.Connection, hashes: Sequence[str], run: str | None) -> dict[str, str]:
    """The id of each one's newest stored attempt."""
    place = sa.func.row_number().over(partition_by=_rows.task, order_by=_NEWEST_FIRST).label("place")
    found: dict[str, str] = {}
    for chunk in chunked(hashes):
        mine = sa.select(_rows.task, _rows.id, place).where(_TRIED, _rows.task.in_(chunk), run_is(run, _rows.run))
        ranked = mine.subquery()
        query = sa.select(ranked.c.task, ranked.c.id).where(ranked.c.place == 1)
        found |= {row.task: row.id for row in connection.execute(query)}
    return found
