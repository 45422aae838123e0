"""One update: what it planned and got, every row that fed it, and what it did to them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import sqlalchemy as sa

from replay.errors import ReplayError
from replay.questions.filters.query import QueryResult
from replay.records import COMMITTED, FRESH, REPLAY
from replay.storage.format.schema import draws, groups, iterations, metrics, policies
from replay.storage.reclaimed import COLLECTED, IS_KNOWN, with_collected
from replay.storage.statements import selected
from replay.store import ReplayStore


def iteration(store: ReplayStore, run: str, number: int) -> QueryResult:
    """What one update learned from, its metrics, the policy it made (None: never published), and its neighbours."""
    with store.reading() as connection:
        record = committed(connection, run, number)
        rows = fed(connection, run, first=number, last=number)
        column = iterations.c.iteration
        neighbours = sa.select(
            sa.func.max(sa.case((column < number, column))).label("previous"),
            sa.func.min(sa.case((column > number, column))).label("next"),
            sa.func.max(column).label("last"),
        ).where(iterations.c.run == run)
        same = (policies.c.run == run) & (policies.c.version == record["makes_policy_version"])
        policy = connection.execute(sa.select(policies.c.version, policies.c.checkpoint).where(same)).mappings()
        here = (metrics.c.run == run) & (metrics.c.iteration == number)
        measured = connection.execute(sa.select(metrics.c.name, metrics.c.value).where(here).order_by(metrics.c.name))
        return {
            **record,
            **connection.execute(neighbours).mappings().one(),
            "policy": next(map(dict, policy), None),
            "trajectories": rows,
            "groups": _groups(connection, rows),
            "metrics": {name: value if math.isfinite(value or 0.0) else None for name, value in measured},
        }


def committed(connection: sa.Connection, run: str, number: int) -> QueryResult:
    """The record of an iteration; raises ReplayError for one that has not been committed."""
    mine = iterations.c.run == run
    query = sa.select(iterations).where(mine, iterations.c.iteration == number)
    found = connection.execute(query).mappings().one_or_none()
    if found is None:
        last = connection.scalar(sa.select(sa.func.max(iterations.c.iteration)).where(mine)) or 0
        raise ReplayError(f"iteration must be a committed one, from 1 to {last}, got {number}.")
    return {**found, "makes_policy_version": found["policy_version"] + 1}


def fed(connection: sa.Connection, run: str, *, first: int, last: int) -> list[QueryResult]:
    """Every draw that the updates from one iteration to another learned from, with what its row was collected with."""
    query = (
        sa.select(draws, *COLLECTED)
        .select_from(with_collected(draws, draws.c.trajectory))
        .where(draws.c.run == run, draws.c.state == COMMITTED, draws.c.iteration.between(first, last), IS_KNOWN)
        .order_by(draws.c.iteration, draws.c.slot)
    )
    # Both tables have a state; the row's is the one to know, all of these draws being committed.
    names = [str(column.key) for column in (*draws.c, *COLLECTED)]
    return [dict(zip(names, row, strict=True)) for row in connection.execute(query)]


def _groups(connection: sa.Connection, rows: Sequence[QueryResult]) -> list[QueryResult]:
    """The groups of the rows, in the order of their first slots.

    `degenerate`: there was nothing to compare in it when it was collected. `teaches`: a row of it had an advantage in
    the update, which a row of a degenerate group can have too, by another baseline or a stored member completing it.
    """
    members: dict[str, list[QueryResult]] = {}
    for row in rows:
        members.setdefault(row["group"], []).append(row)
    found = {group.id: dict(group._mapping) for group in selected(connection, [*groups.c], groups.c.id, list(members))}
    return [
        {
            **found[id],
            "stream": of_group[0]["stream"],
            "slots": [row["slot"] for row in of_group],
            "degenerate": found[id]["size"] < 2 or found[id]["reward_std"] == 0.0,
            "teaches": any(row["advantage"] for row in of_group),
        }
        for id, of_group in members.items()
    ]


def lineage_up_to(store: ReplayStore, run: str, iteration: int) -> QueryResult:
    """What the weights after `iteration` have learned from, one line per iteration, and every draw behind them."""
    with store.reading() as connection:
        last = committed(connection, run, iteration) if iteration else None
        query = sa.select(iterations).where(iterations.c.run == run, iterations.c.iteration <= iteration)
        found = connection.execute(query.order_by(iterations.c.iteration)).mappings()
        used = fed(connection, run, first=1, last=iteration)
        return {
            "run": run,
            "iteration": iteration,
            "policy_version": last["makes_policy_version"] if last else 0,
            "iterations": [dict(row) for row in found],
            "different": len({row["trajectory"] for row in used}),
            "fresh": sum(row["stream"] == FRESH for row in used),
            "replay": sum(row["stream"] == REPLAY for row in used),
            "trajectories": used,
        }
