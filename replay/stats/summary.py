"""The buffer in numbers."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from replay import schema
from replay.records import COMMITTED, REPLAY, RESERVED, STATES
from replay.schema import draws, groups, policies, runs
from replay.stats.rows import Answer, chosen, of_run
from replay.store import ReplayStore
from replay.where import condition

_rows = schema.trajectories.c


def _sum(column: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    """PostgreSQL makes sums and means of whole numbers decimals, which are no JSON."""
    return sa.cast(sa.func.coalesce(sa.func.sum(column), 0), sa.BigInteger)


def _mean(column: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
    return sa.func.avg(sa.cast(column, sa.Double))


_TOTALS = (
    sa.func.count().label("trajectories"),
    _sum(_rows.num_tokens).label("tokens"),
    _sum(_rows.num_action_tokens).label("action_tokens"),
    _sum(sa.cast(_rows.success, sa.Integer)).label("successes"),
    _mean(_rows.reward).label("reward_mean"),
    _mean(_rows.num_turns).label("turns_mean"),
)


def summary(store: ReplayStore, run: str | None = None, *, where: str | None = None) -> Answer:
    """The buffer in numbers, over every stored row; `states` tells the same apart. None: all runs of the database.

    `where`: over the rows of that filter (`replay.where`), their groups, tasks and draws.
    """
    rows = chosen(run, where)
    with store.reading() as connection:
        stops = sa.select(_rows.stop_reason, sa.func.count()).where(rows).group_by(_rows.stop_reason)
        return {
            "database": store.url,
            "bytes": store.size(connection),
            "runs": _count(connection, run, runs.c.id),
            "iterations": _count(connection, run, schema.iterations.c.run),
            "policies": _count(connection, run, policies.c.run),
            **_groups(connection, run, where),
            **connection.execute(sa.select(*_TOTALS).where(rows)).mappings().one(),
            "states": _states(connection, rows),
            "stop_reasons": {row[0]: row[1] for row in connection.execute(stops.order_by(_rows.stop_reason))},
            "draws": _draws(connection, run, where),
        }


_GROUP_COUNTS = (sa.func.count(sa.distinct(groups.c.task)).label("tasks"), sa.func.count(groups.c.id).label("groups"))


def _groups(connection: sa.Connection, run: str | None, where: str | None) -> Answer:
    query = of_run(run, groups.c.run, *_GROUP_COUNTS)
    if where is not None:
        query = query.where(groups.c.id.in_(sa.select(_rows.group).where(chosen(run, where))))
    return dict(connection.execute(query).mappings().one())


def _states(connection: sa.Connection, rows: sa.ColumnElement[bool]) -> Answer:
    query = sa.select(_rows.state, *_TOTALS).where(rows).group_by(_rows.state)
    found = {row.pop("state"): row for row in map(dict, connection.execute(query).mappings())}
    return {state: found[state] for state in STATES if state in found}


def _draws(connection: sa.Connection, run: str | None, where: str | None) -> Answer:
    """Rows that fed updates, by stream, and how old the replayed ones were."""
    mine = sa.true() if run is None else draws.c.run == run
    if where is not None:
        mine = mine & draws.c.trajectory.in_(sa.select(_rows.id).where(condition(where)))
    committed = sa.and_(mine, draws.c.state == COMMITTED)
    streams = sa.select(draws.c.stream, sa.func.count()).where(committed).group_by(draws.c.stream)
    replayed = sa.select(
        sa.func.count(sa.distinct(draws.c.trajectory)).label("trajectories_replayed"),
        _mean(draws.c.staleness).label("staleness_mean"),
        sa.func.max(draws.c.staleness).label("staleness_max"),
        _mean(draws.c.drift_mean).label("drift_mean"),
        sa.func.max(draws.c.drift_max).label("drift_max"),
    ).where(committed, draws.c.stream == REPLAY)
    reserved = sa.select(sa.func.count()).where(mine, draws.c.state == RESERVED)
    return {
        "fresh": 0,
        "replay": 0,
        **{row[0]: row[1] for row in connection.execute(streams)},
        "reserved": connection.scalar(reserved),
        **connection.execute(replayed).mappings().one(),
    }


def _count(connection: sa.Connection, run: str | None, owner: sa.Column[str]) -> int:
    return connection.scalar(of_run(run, owner, sa.func.count(owner))) or 0
