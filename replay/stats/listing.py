"""Trajectories, a line each."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from replay import schema
from replay.stats.rows import STALENESS, USES, Answer, chosen, newest_policies, uses_by_trajectory
from replay.store import ReplayStore

_rows = schema.trajectories.c


class Sort(StrEnum):
    """What a listing can be sorted by; the greatest come first."""

    iteration = "iteration"
    reward = "reward"
    advantage = "advantage"
    turns = "turns"
    tools = "tools"
    tokens = "tokens"
    uses = "uses"
    staleness = "staleness"


_SORTED_BY: dict[Sort, sa.ColumnElement[Any]] = {
    Sort.iteration: _rows.iteration,
    Sort.reward: _rows.reward,
    Sort.advantage: _rows.advantage,
    Sort.turns: _rows.num_turns,
    Sort.tools: _rows.num_tool_calls,
    Sort.tokens: _rows.num_tokens,
    Sort.uses: USES,
    Sort.staleness: STALENESS,
}


def trajectories(
    store: ReplayStore,
    run: str | None = None,
    *,
    where: str | None = None,
    success: bool | None = None,
    sort: Sort = Sort.iteration,
    limit: int | None = None,
) -> list[Answer]:
    """One line per trajectory, the greatest in `sort` first; staleness is relative to the run's newest policy."""
    columns = [
        *(_rows[name] for name in ("id", "run", "iteration", "slot", "task", "reward", "success")),
        *(_rows[name] for name in ("num_turns", "num_tool_calls", "num_tokens", "num_action_tokens")),
        *(_rows[name] for name in ("stop_reason", "error_kind", "advantage", "state", "state_reason")),
        _rows.group.label("group"),
        USES,
        STALENESS,
    ]
    source = schema.trajectories.outerjoin(uses_by_trajectory, _rows.id == uses_by_trajectory.c.trajectory)
    query = sa.select(*columns).select_from(source.outerjoin(newest_policies, _rows.run == newest_policies.c.run))
    query = query.where(chosen(run, where))
    if success is not None:
        query = query.where(_rows.success == success)
    order = [_SORTED_BY[sort].desc().nulls_last(), _rows.iteration.desc(), _rows.slot, _rows.run, _rows.id]
    with store.reading() as connection:
        found = connection.execute(query.order_by(*order).limit(limit)).mappings()
        return [dict(row) for row in found]
