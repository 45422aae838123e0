"""One task: how it was tried over time, what is stored of it, and how hard it has been."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from replay.errors import ReplayError
from replay.queries.excerpts import opening
from replay.queries.filters.query import QueryResult
from replay.records import COMMITTED, ELIGIBLE, ORPHANED, REMOVED_TASK, REPLAY
from replay.sampling.samplers import successes
from replay.storage.format import schema
from replay.storage.format.column_types import ExactText
from replay.storage.format.encoding import BlobError
from replay.storage.format.message_json import messages_of
from replay.storage.format.schema import draws, groups, iterations, messages, tasks
from replay.store import ReplayStore

_rows = schema.trajectories.c
_MOST_GROUPS = 200
"""The newest are listed one by one; of the others there is only what they add up to."""
_MOST_VERSIONS = 40
"""Per run: of more policies some are counted together."""
_LISTED = (
    *(_rows[name] for name in ("id", "run", "iteration", "slot", "member", "policy_version_min", "reward", "success")),
    *(_rows[name] for name in ("advantage", "num_turns", "num_tokens", "stop_reason", "error_kind", "state")),
    _rows.uses,
    _rows.group.label("group"),
)


def total(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    return sa.cast(sa.func.coalesce(sa.func.sum(sa.case((condition, 1), else_=0)), 0), sa.BigInteger)


TRIED = _rows.state != ORPHANED
"""Attempts of iterations that were undone count for nothing; they are listed with their state."""
_COUNTS = (
    sa.func.count().label("attempts"),
    total(_rows.success).label("successes"),
    sa.func.avg(_rows.reward).label("reward_mean"),
)


def task(
    store: ReplayStore, hash_prefix: str, run: str | None = None, *, after: str | None = None, limit: int = 50
) -> QueryResult:
    """What is known of one task, in one run or in all of the database.

    Attempts are rows that are stored, and the members of groups of which no row is any more: these count in `groups`
    and in the totals, as they were collected. `versions`: success of stored rows by the policies that tried it.
    `groups`: its attempts over time, the newest first. `difficulty`: the buckets of the sampler of that name, by
    successes among so many members. `trajectories`: newest first, `limit` of them, those behind the row `after`; `next`
    is the last one's id if there are more.
    """
    with store.reading() as connection:
        found = _find(connection, hash_prefix, store.url)
        mine = _rows.task == found["hash"]
        if run is not None:
            # As an expression: rows of a task are few, and the index of a run's rows would be read instead.
            mine = mine & (_rows.run.concat("") == run)
        tried, gone = _groups(connection, found["hash"], run, mine)
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
    query = sa.select(tasks).where(begins).order_by(tasks.c.hash).limit(2)
    rows = connection.execute(sa.select(tasks).where(tasks.c.hash == hash_prefix)).mappings().all()
    rows = rows or connection.execute(query).mappings().all()
    if not hash_prefix or len(rows) != 1:
        which = "none" if not (rows and hash_prefix) else "more than one: " + ", ".join(row["hash"] for row in rows)
        raise ReplayError(
            f"HASH must be the beginning of one task's hash in {url}, got {hash_prefix!r}, which begins {which}. "
            "See: agentloop replay ls --json"
        )
    (row,) = rows
    removed = row["payload"] == REMOVED_TASK
    payload = None if removed else json.loads(row["payload"])
    return {"hash": row["hash"], "environment": row["environment"], "payload": payload, "removed": removed}


def _totals(connection: sa.Connection, mine: sa.ColumnElement[bool]) -> QueryResult:
    def of_tried(value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        return sa.case((TRIED, value))

    query = sa.select(
        total(TRIED).label("attempts"),
        total(TRIED & _rows.success).label("successes"),
        sa.func.avg(of_tried(_rows.reward)).label("reward_mean"),
        total(_rows.state == ELIGIBLE).label("eligible"),
        sa.func.min(of_tried(_rows.iteration)).label("first_iteration"),
        sa.func.max(of_tried(_rows.iteration)).label("last_iteration"),
        sa.func.count(sa.distinct(of_tried(_rows.run))).label("runs"),
        total(~TRIED).label("orphaned"),
    )
    return dict(connection.execute(query.where(mine)).mappings().one())


def _prompt(connection: sa.Connection, mine: sa.ColumnElement[bool]) -> list[QueryResult] | None:
    """What the newest attempt that still has its messages was asked: all before the first reply."""
    query = (
        sa.select(messages.c.num_messages, messages.c.said, messages.c.checksum)
        .join_from(schema.trajectories, messages, _rows.id == messages.c.trajectory)
        .where(mine)
        .order_by(_rows.iteration.desc(), _rows.run, _rows.slot, _rows.id)
        .limit(1)
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    try:
        conversation = messages_of(*row)
    except BlobError:
        return None
    return [{"author": each.author, "role": each.role, "content": each.content} for each in opening(conversation)]


def _versions(connection: sa.Connection, mine: sa.ColumnElement[bool]) -> list[QueryResult]:
    """By run and policy; as many policies together as keep the list short."""
    version = _rows.policy_version_min
    least, greatest = sa.func.min(version), sa.func.max(version)
    width = (greatest - least) // sa.literal(_MOST_VERSIONS, sa.BigInteger) + 1
    spans = sa.select(_rows.run, least.label("least"), greatest.label("greatest"), width.label("width"))
    span = spans.where(mine, TRIED).group_by(_rows.run).subquery()
    step = ((version - span.c.least) // span.c.width).label("step")
    query = sa.select(_rows.run, *(span.c[name] for name in ("least", "greatest", "width")), step, *_COUNTS)
    query = query.join_from(schema.trajectories, span, span.c.run == _rows.run).where(mine, TRIED)
    query = query.group_by(_rows.run, span.c.least, span.c.greatest, span.c.width, "step").order_by(_rows.run, "step")
    found: list[QueryResult] = []
    for row in connection.execute(query).mappings():
        first = row["least"] + row["step"] * row["width"]
        counts = {name: row[name] for name in ("attempts", "successes", "reward_mean")}
        found.append(
            {"run": row["run"], "first": first, "last": min(first + row["width"] - 1, row["greatest"]), **counts}
        )
    return found


_GROUP = ("id", "run", "iteration", "size", "reward_mean", "reward_std", "success_rate")
# An import's iteration was another database's; a live run's newest may not be committed yet.
_MADE = (
    sa.exists()
    .where(iterations.c.run == groups.c.run, iterations.c.iteration == groups.c.iteration)
    .correlate(groups)
    .label("committed")
)


def _groups(
    connection: sa.Connection, task: str, run: str | None, mine: sa.ColumnElement[bool]
) -> tuple[list[QueryResult], list[QueryResult]]:
    """As they were collected, what is left of them, and how often their rows were drawn since; the newest first.

    All of them, and those of which no row is stored any more: one that a resume undid is there once its rows are gone.
    """
    left = (
        sa.select(_rows.group.label("id"), total(_rows.state == ELIGIBLE).label("eligible"))
        .where(mine, TRIED)
        .group_by(_rows.group)
        .subquery()
    )
    is_gone = ~sa.exists().where(_rows.group == groups.c.id)
    eligible = sa.func.coalesce(left.c.eligible, 0).label("eligible")
    query = sa.select(*(groups.c[name] for name in _GROUP), eligible, _MADE, left.c.id.label("left"))
    query = query.outerjoin(left, left.c.id == groups.c.id).where(groups.c.task == task)
    query = query.where(left.c.id.is_not(None) | is_gone)
    if run is not None:
        query = query.where(groups.c.run == run)
    drawn = (
        sa.select(_rows.group, sa.func.count())
        .join_from(schema.trajectories, draws, draws.c.trajectory == _rows.id)
        .where(mine, TRIED, draws.c.state == COMMITTED, draws.c.stream == REPLAY)
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
        key = (group["successes"], group["size"])
        bucket = buckets.setdefault(
            key, {"successes": key[0], "size": key[1], "groups": 0, "eligible": 0, "replayed": 0, "newest": not buckets}
        )
        bucket["groups"] += 1
        bucket["eligible"] += group["eligible"]
        bucket["replayed"] += group["replayed"]
    return sorted(buckets.values(), key=lambda bucket: (bucket["size"], bucket["successes"]))


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
    query = query.order_by(_rows.iteration.desc(), _rows.run, _rows.slot, _rows.id).limit(limit + 1)
    return [dict(row) for row in connection.execute(query).mappings()]
