"""A run that workers collect, as one answer: who takes part, where every episode is, and who waits for whom."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from replay.queries.collecting import fresh_staleness, reported_facts, unended_episodes
from replay.queries.collecting.who_waits import Standing, who_waits
from replay.queries.filters.query import QueryResult
from replay.records import RunRecord, stored_setting
from replay.storage.collecting.planned_batches import count_tickets
from replay.storage.databases.clock import seconds_now
from replay.storage.format.schema import runs, tickets, workers
from replay.store import ReplayStore
from replay.ticket_records import LEASED, QUEUED, TICKET_STATES, TicketCounts

_LEASE_S = 60.0
"""Of runs whose configuration does not say."""


def cluster(store: ReplayStore, run: RunRecord) -> QueryResult:
    """All of one moment. Counts are of all iterations, `staleness` of the newest ones.

    `counts` are of training tickets, and `adds_up` where nothing that was acknowledged is lost: the finished ones are
    the sum of what became of their rows. `late_share` is of the rows that were to be fresh and are not waited for.
    Ages are in seconds by the database's clock; what a participant does not report is None.
    """
    lease_s = stored_setting(run.config, "collection.lease_s", float) or _LEASE_S
    with store.reading() as connection:
        counts = count_tickets(connection, run.id)
        evaluations, tried_again = unended_episodes.evaluation_states(connection, run.id)
        newest = fresh_staleness.newest_iteration(connection, run.id)
        ended, leader = _leader(connection, run.id)
        batch = unended_episodes.open_batch(connection, run.id)
        held = unended_episodes.held(connection, run.id)
        standing = Standing(
            ended=ended,
            leader=leader,
            iteration=newest + 1,
            is_updating=fresh_staleness.is_updating(connection, run.id, newest + 1),
            batch=batch,
            first=unended_episodes.first_wanted(connection, run.id, batch["number"] if batch else None),
            evaluations=evaluations[QUEUED] + evaluations[LEASED],
            queued=counts.queued + evaluations[QUEUED],
            leased=counts.leased + evaluations[LEASED],
            issued=sum(getattr(counts, state) + evaluations[state] for state in TICKET_STATES),
            workers=reported_facts.workers(connection, run.id, held, lease_s=lease_s),
            engines=reported_facts.engines(connection, run.id),
        )
        return {
            "run": run.id,
            "collected_by": "workers" if _has_any(connection, run) else "loop",
            "ended": ended,
            "iteration": newest,
            "waits": asdict(who_waits(standing)),
            "leader": leader,
            "lease_s": lease_s,
            "workers": list(standing.workers),
            "engines": list(standing.engines),
            **_counted(counts),
            "evaluations": evaluations,
            "tried_again": tried_again,
            "oldest": unended_episodes.oldest(connection, run.id),
            "batch": batch,
            "reasons": unended_episodes.end_reasons(connection, run.id),
            "max_staleness": stored_setting(run.config, "collection.max_staleness", int),
            "staleness": fresh_staleness.staleness_by_iteration(connection, run.id, newest),
        }


def is_collected_by_workers(store: ReplayStore, run: RunRecord) -> bool:
    """Whether anybody collects it but the training process, whose engines report themselves too."""
    with store.reading() as connection:
        return _has_any(connection, run)


def _has_any(connection: sa.Connection, run: RunRecord) -> bool:
    if stored_setting(run.config, "collection.by", str) == "workers":
        return True
    return any(connection.scalar(sa.select(sa.exists().where(table.c.run == run.id))) for table in (tickets, workers))


def _counted(counts: TicketCounts) -> QueryResult:
    used = counts.fresh + counts.late
    return {
        "counts": {**asdict(counts), "rows": counts.rows, "adds_up": counts.rows == counts.done},
        "late_share": counts.late / used if used else None,
    }


def _leader(connection: sa.Connection, run: str) -> tuple[bool, QueryResult | None]:
    """Whether the run has ended; and its learner with what is left of its lease, below 0 where that is over."""
    left: Any = sa.type_coerce(runs.c.leader_due - seconds_now(), sa.Double)
    row = connection.execute(sa.select(runs.c.ended, runs.c.leader, left.label("lease")).where(runs.c.id == run)).one()
    if row.leader is None or row.lease is None:
        return bool(row.ended), None
    return bool(row.ended), {"id": row.leader, "lease_s": row.lease, "holds": row.lease >= 0}
