"""What happened iteration by iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence

import sqlalchemy as sa

from replay import schema
from replay.schema import metrics
from replay.stats.rows import Answer, of_run
from replay.store import ReplayStore


def iterations(store: ReplayStore, run: str | None = None) -> list[Answer]:
    """What each iteration planned and got, in order."""
    table = schema.iterations.c
    query = of_run(run, table.run, *table).order_by(table.run, table.iteration)
    with store.reading() as connection:
        return [dict(row) for row in connection.execute(query).mappings()]


def metric_series(
    store: ReplayStore, run: str, *, names: Sequence[str] = (), families: Sequence[str] = ()
) -> dict[str, list[tuple[int, float]]]:
    """(iteration, value) in order, by metric name; values that were not known are left out.

    Of these `names`, and of those that begin like one of `families`; of all where neither is given.
    """
    wanted = sa.or_(metrics.c.name.in_(names), *(metrics.c.name.startswith(each, autoescape=True) for each in families))
    query = of_run(run, metrics.c.run, metrics.c.name, metrics.c.iteration, metrics.c.value)
    query = query.where(wanted) if names or families else query
    series: dict[str, list[tuple[int, float]]] = {}
    with store.reading() as connection:
        for name, iteration, value in connection.execute(query.order_by(metrics.c.iteration, metrics.c.name)):
            if value is not None and math.isfinite(value):
                series.setdefault(name, []).append((iteration, value))
    return series
