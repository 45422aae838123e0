"""What happened iteration by iteration."""

from __future__ import annotations

import math

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


def metric_series(store: ReplayStore, run: str) -> dict[str, list[tuple[int, float]]]:
    """(iteration, value) in order, by metric name; values that were not known are left out."""
    query = of_run(run, metrics.c.run, metrics.c.name, metrics.c.iteration, metrics.c.value)
    series: dict[str, list[tuple[int, float]]] = {}
    with store.reading() as connection:
        for name, iteration, value in connection.execute(query.order_by(metrics.c.name, metrics.c.iteration)):
            if value is not None and math.isfinite(value):
                series.setdefault(name, []).append((iteration, value))
    return series


def runs(store: ReplayStore) -> list[Answer]:
    """The runs of the database with what each has come to, in the order they were added."""
    columns = (schema.runs.c.id, schema.runs.c.name, schema.runs.c.code_version, schema.runs.c.started_at)
    done = sa.select(sa.func.max(schema.iterations.c.iteration)).where(schema.iterations.c.run == schema.runs.c.id)
    stored = sa.select(sa.func.count()).where(schema.trajectories.c.run == schema.runs.c.id)
    query = sa.select(
        *columns,
        sa.func.coalesce(done.scalar_subquery(), 0).label("iterations"),
        stored.scalar_subquery().label("trajectories"),
    ).order_by(schema.runs.c.started_at, schema.runs.c.id)
    with store.reading() as connection:
        return [dict(row) for row in connection.execute(query).mappings()]
