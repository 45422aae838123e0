"""The buffer in numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa

from replay.questions.filters import condition
from replay.questions.filters.query import QueryResult, chosen, newest_versions, run_is, staleness
from replay.records import COMMITTED, ELIGIBLE, REPLAY, RESERVED, STATES
from replay.storage.format import schema
from replay.storage.format.schema import draws, groups, policies, reclaimed, runs
from replay.store import ReplayStore

_rows = schema.trajectories.c


def total(column: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    """PostgreSQL makes sums and means of whole numbers decimals, which are no JSON."""
    return sa.cast(sa.func.coalesce(sa.func.sum(column), 0), sa.BigInteger)


def mean(column: sa.Column[Any]) -> sa.Function[float]:
    return sa.func.avg(sa.cast(column, sa.Double), type_=sa.Double)


_SUMS = {
    "trajectories": sa.func.count(),
    "tokens": total(_rows.num_tokens),
    "action_tokens": total(_rows.num_action_tokens),
    "successes": total(sa.cast(_rows.success, sa.Integer)),
    "reward": sa.func.sum(_rows.reward),
    "turns": total(_rows.num_turns),
}


def summary(store: ReplayStore, run: str | None = None, *, filter: str | None = None) -> QueryResult:
    """The buffer in numbers, over every stored row of a run (None: of all) and by state and source.

    `filter`: over the rows it holds for (`replay.questions.filters`), their groups, tasks and draws. Rows that were
    `reclaimed`, of which a few numbers are left, are counted apart, whatever the filter.
    """
    rows = chosen(run, filter)
    with store.reading() as connection:
        kinds = _kinds(connection, rows)
        age = staleness(newest_versions(connection, run), run)
        return {
            "database": store.url,
            "bytes": store.size(connection),
            "runs": _count(connection, run, runs.c.id),
            "iterations": _count(connection, run, schema.iterations.c.run),
            "policies": _count(connection, run, policies.c.run),
            **_groups(connection, run, filter),
            **_totals(kinds.values()),
            "states": _by_part(kinds, 0, STATES),
            "sources": _by_part(kinds, 2, sorted({source for *_, source in kinds})),
            "reclaimed": _reclaimed(connection, run),
            "stop_reasons": _stop_reasons(kinds),
            "staleness": buffer_staleness(connection, age, rows),
            "draws": _draws(connection, run, filter),
        }


def buffer_staleness(
    connection: sa.Connection, age: sa.ColumnElement[int], rows: sa.ColumnElement[bool]
) -> QueryResult:
    """Mean and largest staleness `age` of the rows that can be drawn, and of how many it is `known`."""
    known = sa.select(
        sa.func.avg(sa.cast(age, sa.Double)).label("mean"),
        sa.cast(sa.func.max(age), sa.BigInteger).label("max"),
        sa.func.count(age).label("known"),
    )
    return dict(connection.execute(known.where(rows, _rows.state == ELIGIBLE)).mappings().one())


def _reclaimed(connection: sa.Connection, run: str | None) -> int:
    """Rows that were evicted for good, and so are none of those that a filter asks."""
    query = sa.select(sa.func.count()).select_from(reclaimed)
    if run is not None:
        query = query.join(groups, groups.c.id == reclaimed.c.group).where(groups.c.run == run)
    return connection.scalar(query) or 0


_GROUP_COUNTS = (sa.func.count(sa.distinct(groups.c.task)).label("tasks"), sa.func.count(groups.c.id).label("groups"))


def _groups(connection: sa.Connection, run: str | None, filter: str | None) -> QueryResult:
    query = sa.select(*_GROUP_COUNTS).where(run_is(run, groups.c.run))
    if filter is not None:
        query = query.where(groups.c.id.in_(sa.select(_rows.group).where(chosen(run, filter))))
    return dict(connection.execute(query).mappings().one())


_Kinds = dict[tuple[str, str, str], QueryResult]
"""Sums by state, stop reason and source, from which follows all that is said of the rows: they are looked at once."""


def _kinds(connection: sa.Connection, rows: sa.ColumnElement[bool]) -> _Kinds:
    sums = (value.label(name) for name, value in _SUMS.items())
    # The more telling one first: rows are sorted for it by SQLite, which looks further where they are equal.
    kind = (_rows.stop_reason, _rows.state, _rows.source)
    query = sa.select(*kind, *sums).where(rows).group_by(*kind)
    found = map(dict, connection.execute(query).mappings())
    return {(row.pop("state"), row.pop("stop_reason"), row.pop("source")): row for row in found}


def _totals(sums: Collection[QueryResult]) -> QueryResult:
    found: QueryResult = {name: sum(each[name] for each in sums) for name in _SUMS}
    reward, turns, count = found.pop("reward"), found.pop("turns"), found["trajectories"]
    means = (reward / count, turns / count) if count else (None, None)
    return {**found, "reward_mean": means[0], "turns_mean": means[1]}


def _by_part(kinds: _Kinds, part: int, order: Sequence[str]) -> QueryResult:
    """The totals of each state, or of each source: the part of the key that is asked."""
    there = {key[part] for key in kinds}
    totals = {name: [sums for key, sums in kinds.items() if key[part] == name] for name in order if name in there}
    return {name: _totals(sums) for name, sums in totals.items()}


def _stop_reasons(kinds: _Kinds) -> dict[str, int]:
    counts: dict[str, int] = {}
    for (_, reason, _), sums in sorted(kinds.items(), key=lambda item: item[0][1]):
        counts[reason] = counts.get(reason, 0) + sums["trajectories"]
    return counts


def _draws(connection: sa.Connection, run: str | None, filter: str | None) -> QueryResult:
    """Rows that fed updates, by stream, and how old the replayed ones were."""
    mine = run_is(run, draws.c.run)
    if filter is not None:
        mine = mine & draws.c.trajectory.in_(sa.select(_rows.id).where(condition(filter)))
    committed = draws.c.state == COMMITTED
    # Most draws are fresh and committed: no sum looks at them, and an index alone counts all there are.
    others = sa.select(
        sa.func.count().label("others"),
        sa.func.count().filter(committed).label("replay"),
        sa.func.count().filter(draws.c.state == RESERVED).label("reserved"),
        sa.func.count(sa.distinct(draws.c.trajectory)).filter(committed).label("trajectories_replayed"),
        mean(draws.c.staleness).filter(committed).label("staleness_mean"),
        sa.func.max(draws.c.staleness).filter(committed).label("staleness_max"),
        mean(draws.c.drift_mean).filter(committed).label("drift_mean"),
        sa.func.max(draws.c.drift_max).filter(committed).label("drift_max"),
    ).where(mine, sa.or_(draws.c.stream == REPLAY, draws.c.state == RESERVED))
    found = dict(connection.execute(others).mappings().one())
    all_draws = connection.scalar(sa.select(sa.func.count()).select_from(draws).where(mine)) or 0
    return {"fresh": all_draws - found.pop("others"), **found}


def _count(connection: sa.Connection, run: str | None, owner: sa.Column[str]) -> int:
    return connection.scalar(sa.select(sa.func.count(owner)).where(run_is(run, owner))) or 0
