"""The runs of a database, a line each."""

from __future__ import annotations

import sqlalchemy as sa

from replay import schema
from replay.schema import metrics
from replay.stats.rows import Answer
from replay.store import ReplayStore

_SUCCESS = "eval/success"


def runs(store: ReplayStore) -> list[Answer]:
    """Every run: its newest iteration, its last held-out success, and how many trajectories it has stored."""
    run = schema.runs.c
    newest = sa.select(sa.func.max(schema.iterations.c.iteration)).where(schema.iterations.c.run == run.id)
    stored = sa.select(sa.func.count()).where(schema.trajectories.c.run == run.id)
    evaluated = sa.select(metrics.c.value).where(
        metrics.c.run == run.id, metrics.c.name == _SUCCESS, metrics.c.value.is_not(None)
    )
    query = sa.select(
        run.id,
        run.name,
        sa.func.coalesce(newest.scalar_subquery(), 0).label("iterations"),
        evaluated.order_by(metrics.c.iteration.desc()).limit(1).scalar_subquery().label("success"),
        stored.scalar_subquery().label("trajectories"),
        run.code_version,
    )
    with store.reading() as connection:
        return [dict(row) for row in connection.execute(query.order_by(run.name, run.id)).mappings()]


def run_names(store: ReplayStore) -> dict[str, str]:
    """Of every run by its id, in the same order, without a look at what it has stored."""
    run = schema.runs.c
    with store.reading() as connection:
        return {row.id: row.name for row in connection.execute(sa.select(run.id, run.name).order_by(run.name, run.id))}
