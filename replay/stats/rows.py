"""What questions about trajectories share: which rows, how often used, how stale."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from replay import schema
from replay.records import COMMITTED
from replay.schema import draws, policies
from replay.where import condition

Answer = dict[str, Any]
"""Plain and JSON-able: what is unknown is None, and no number is NaN."""

_rows = schema.trajectories.c

uses_by_trajectory = (
    sa.select(draws.c.trajectory, sa.func.count().label("uses"))
    .where(draws.c.state == COMMITTED)
    .group_by(draws.c.trajectory)
    .subquery()
)
newest_policies = (
    sa.select(policies.c.run, sa.func.max(policies.c.version).label("version")).group_by(policies.c.run).subquery()
)
USES = sa.func.coalesce(uses_by_trajectory.c.uses, 0).label("uses")
STALENESS = (newest_policies.c.version - _rows.policy_version_min).label("staleness")


def chosen(run: str | None, where: str | None) -> sa.ColumnElement[bool]:
    """Rows of a run, or of all, that a filter holds for."""
    mine = sa.true() if run is None else _rows.run == run
    return mine if where is None else mine & condition(where)


def of_run(run: str | None, owner: sa.Column[str], *columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
    query = sa.select(*columns)
    return query if run is None else query.where(owner == run)
