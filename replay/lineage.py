"""Which experience fed which update: from weights to all of it, and from a trajectory to its updates.

From one iteration to its trajectories: `stats.iteration`.
"""

from __future__ import annotations

import sqlalchemy as sa

from replay.column_types import ExactText
from replay.reclaimed import BORN, with_born
from replay.records import COMMITTED, FRESH, REPLAY
from replay.schema import draws, groups, iterations, policies, reclaimed, trajectories
from replay.stats import Answer, find
from replay.stats.iteration import committed, fed
from replay.store import ReplayStore

_rows = trajectories.c


def up_to(store: ReplayStore, run: str, iteration: int) -> Answer:
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


def of_trajectory(store: ReplayStore, id_prefix: str) -> Answer:
    """Where a trajectory came from, every update that used it, how far it had drifted, and the policy that came of it.

    It works for rows that were evicted, pruned or forgotten.
    """
    id = find(store, id_prefix)
    with store.reading() as connection:
        asked = sa.select(sa.literal(id, ExactText).label("id")).subquery()
        parent = sa.func.coalesce(_rows.parent, reclaimed.c.parent).label("parent")
        facts = sa.select(asked.c.id, *BORN, parent, groups.c.success_rate)
        born = connection.execute(facts.select_from(with_born(asked, asked.c.id))).mappings()
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


def _same_iteration() -> sa.ColumnElement[bool]:
    return (iterations.c.run == draws.c.run) & (iterations.c.iteration == draws.c.iteration)
