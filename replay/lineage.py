"""Which experience fed which update: from an iteration to its trajectories, and from a trajectory to its updates."""

from __future__ import annotations

import sqlalchemy as sa

from replay.errors import ReplayError
from replay.records import COMMITTED, FRESH, REPLAY
from replay.schema import draws, groups, iterations, policies, runs, trajectories
from replay.stats import Answer, find
from replay.store import ReplayStore

_rows = trajectories.c
_BORN = (
    _rows.run.label("born_run"),
    _rows.iteration.label("born_iteration"),
    _rows.source,
    _rows.task,
    _rows.group.label("group"),
    _rows.reward,
    _rows.success,
    _rows.policy_version_min,
    _rows.state,
)


def of_iteration(store: ReplayStore, run: str, iteration: int) -> Answer:
    """What one update learned from, in the order of its slots, and the policy it made."""
    with store.reading() as connection:
        record = _iteration(connection, run, iteration)
        return {**record, "trajectories": _fed(connection, run, first=iteration, last=iteration)}


def up_to(store: ReplayStore, run: str, iteration: int) -> Answer:
    """What the weights after `iteration` have learned from, one line per iteration, and every draw behind them."""
    with store.reading() as connection:
        last = _iteration(connection, run, iteration) if iteration else None
        query = sa.select(iterations).where(iterations.c.run == run, iterations.c.iteration <= iteration)
        found = connection.execute(query.order_by(iterations.c.iteration)).mappings()
        fed = _fed(connection, run, first=1, last=iteration)
        return {
            "run": run,
            "iteration": iteration,
            "policy_version": last["makes_policy_version"] if last else 0,
            "iterations": [dict(row) for row in found],
            "different": len({row["trajectory"] for row in fed}),
            "fresh": sum(row["stream"] == FRESH for row in fed),
            "replay": sum(row["stream"] == REPLAY for row in fed),
            "trajectories": fed,
        }


def of_trajectory(store: ReplayStore, id_prefix: str) -> Answer:
    """Where a trajectory came from, every update that used it, how far it had drifted, and the policy that came of it.

    It works for rows whose content was evicted or forgotten.
    """
    id = find(store, id_prefix)
    with store.reading() as connection:
        born = connection.execute(
            sa.select(_rows.id, *_BORN, _rows.state_reason, _rows.parent, _rows.advantage, groups.c.success_rate)
            .join_from(trajectories, groups, _rows.group == groups.c.id)
            .where(_rows.id == id)
        ).mappings()
        used = (
            sa.select(draws, (iterations.c.policy_version + 1).label("makes_policy_version"), policies.c.checkpoint)
            .join(iterations, _same_iteration())
            .outerjoin(
                policies, (policies.c.run == draws.c.run) & (policies.c.version == iterations.c.policy_version + 1)
            )
            .where(draws.c.trajectory == id, draws.c.state == COMMITTED)
            .order_by(draws.c.run, draws.c.iteration, draws.c.slot)
        )
        uses = [dict(row) for row in connection.execute(used).mappings()]
        return {**dict(born.one()), "uses": uses}


def one_run(store: ReplayStore, run: str | None) -> str:
    """The run asked about, or the only one that has updated anything."""
    if run is not None:
        return run
    with store.reading() as connection:
        known = list(connection.scalars(sa.select(iterations.c.run).distinct().order_by(iterations.c.run)))
        known = known or list(connection.scalars(sa.select(runs.c.id).order_by(runs.c.id)))
    if len(known) != 1:
        raise ReplayError(
            f"RUN must name one run of {store.url}, got {len(known)} ({', '.join(known[:5])}). Give its run folder."
        )
    return str(known[0])


def _same_iteration() -> sa.ColumnElement[bool]:
    return (iterations.c.run == draws.c.run) & (iterations.c.iteration == draws.c.iteration)


def _iteration(connection: sa.Connection, run: str, iteration: int) -> Answer:
    mine = iterations.c.run == run
    query = sa.select(iterations).where(mine, iterations.c.iteration == iteration)
    found = connection.execute(query).mappings().one_or_none()
    if found is None:
        last = connection.scalar(sa.select(sa.func.max(iterations.c.iteration)).where(mine)) or 0
        raise ReplayError(f"iteration must be a committed one, from 1 to {last}, got {iteration}.")
    return {**dict(found), "makes_policy_version": found["policy_version"] + 1}


def _fed(connection: sa.Connection, run: str, *, first: int, last: int) -> list[Answer]:
    query = (
        sa.select(draws, *_BORN)
        .join_from(draws, trajectories, draws.c.trajectory == _rows.id)
        .where(draws.c.run == run, draws.c.state == COMMITTED, draws.c.iteration.between(first, last))
        .order_by(draws.c.iteration, draws.c.slot)
    )
    # Both tables have a state; the row's is the one to know, all of these draws being committed.
    names = [column.key for column in (*draws.c, *_BORN)]
    return [dict(zip(names, row, strict=True)) for row in connection.execute(query)]
