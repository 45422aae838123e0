"""How stale the fresh rows of each batch were, and how far collecting may run ahead."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from replay.queries.filters.query import QueryResult
from replay.records import COMMITTED, FRESH, RESERVED
from replay.storage.format.schema import draws, iterations

MOST_ITERATIONS = 200
_mean: Any = sa.func.avg(sa.cast(draws.c.staleness, sa.Double))


def newest_iteration(connection: sa.Connection, run: str) -> int:
    """The last one that was committed; 0: none was."""
    query = sa.select(sa.func.max(iterations.c.iteration)).where(iterations.c.run == run)
    return connection.scalar(query) or 0


def is_updating(connection: sa.Connection, run: str, iteration: int) -> bool:
    """Whether the rows of that iteration's batch are reserved: the learner has what it needs."""
    reserved = (draws.c.run == run) & (draws.c.iteration == iteration) & (draws.c.state == RESERVED)
    return connection.execute(sa.select(draws.c.slot).where(reserved).limit(1)).first() is not None


def staleness_by_iteration(connection: sa.Connection, run: str, newest: int) -> list[QueryResult]:
    """Of the newest iterations, in order: publishes between a fresh row's oldest token and its update."""
    fresh = (draws.c.run == run) & (draws.c.state == COMMITTED) & (draws.c.stream == FRESH)
    query = sa.select(
        draws.c.iteration,
        sa.func.count().label("rows"),
        _mean.label("mean"),
        sa.func.max(draws.c.staleness).label("max"),
    ).where(fresh, draws.c.iteration > newest - MOST_ITERATIONS)
    found = connection.execute(query.group_by(draws.c.iteration).order_by(draws.c.iteration))
    return [dict(row) for row in found.mappings()]
