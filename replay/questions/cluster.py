"""Who collects a run: its learner, workers and engines, and the reasons why episodes failed."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from replay.questions.filters.query import QueryResult
from replay.records import RunRecord, stored_setting
from replay.storage.collecting.participants import TABLES, list_participants
from replay.storage.collecting.ticket_records import FAILED, REVOKED
from replay.storage.collecting.tickets import count_tickets
from replay.storage.format.schema import runs, tickets, workers
from replay.storage.statements import seconds_now
from replay.store import ReplayStore

_LEASE_S = 60.0
"""Seconds of a lease if the configuration names none."""
_MOST_REASONS = 20
_LONGEST_TEXT = 300
"""Characters of a reason. Reasons that begin with the same characters are counted together."""


def cluster(store: ReplayStore, run: RunRecord) -> QueryResult:
    """List the participants of a run, the longest silent first, and the `reasons` why episodes failed.

    `counts` are of training episodes; `lost` episodes are done and have no row. Ages are in seconds by the database's
    clock. The leader's `lease_s` is below 0 if its lease is over.
    """
    lease_s = stored_setting(run.config, "collection.lease_s", float) or _LEASE_S
    left: Any = sa.type_coerce(runs.c.leader_due - seconds_now(), sa.Double)
    with store.reading() as connection:
        query = sa.select(runs.c.ended, runs.c.leader, left).where(runs.c.id == run.id)
        ended, leader, due_s = connection.execute(query).one()
        counts = count_tickets(connection, run.id)
        return {
            "run": run.id,
            "ended": bool(ended),
            "leader": None if leader is None or due_s is None else {"id": leader, "lease_s": due_s},
            "lease_s": lease_s,
            "counts": {**asdict(counts), "lost": counts.done - counts.rows},
            "workers": _participants(connection, run.id, "worker", _WORKER, lease_s=lease_s),
            "engines": _participants(connection, run.id, "engine", _ENGINE),
            "reasons": _end_reasons(connection, run.id),
        }


def is_collected_by_workers(store: ReplayStore, run: RunRecord) -> bool:
    """True if workers collect the run. Reported engines are no proof, because a single training process reports its
    own, too."""
    if stored_setting(run.config, "collection.by", str) == "workers":
        return True
    with store.reading() as connection:
        query = (sa.select(sa.exists().where(table.c.run == run.id)) for table in (tickets, workers))
        return any(map(connection.scalar, query))


def _end_reasons(connection: sa.Connection, run: str) -> list[QueryResult]:
    state, count = tickets.c.state, sa.func.count()
    reason = sa.func.substr(tickets.c.reason, 1, _LONGEST_TEXT)
    query = sa.select(state, reason.label("reason"), count.label("count"))
    query = query.where(tickets.c.run == run, state.in_((FAILED, REVOKED))).group_by(state, reason)
    found = connection.execute(query.order_by(count.desc(), state, reason).limit(_MOST_REASONS))
    return [dict(row) for row in found.mappings()]


_WORKER = ("host", "state", "pid", "concurrency", "in_flight", "done", "failed", "tool_errors")
_ENGINE = ("state", "label", "adapter", "model", "version", "difference")
"""`difference` is the root mean square difference of probed log-probs, in nats. It proves which weights are served."""


def _participants(
    connection: sa.Connection, run: str, role: str, facts: Sequence[str], *, lease_s: float = math.inf
) -> list[QueryResult]:
    """List the participants that have not left. One that was silent for a lease is `gone`."""
    listed = [
        {
            "id": each.id,
            **{name: each.facts.get(name) for name in facts},
            "silent_s": max(0.0, each.silent_s),
            "age_s": max(0.0, each.age_s),
            "gone": each.is_gone(lease_s),
        }
        for each in list_participants(connection, TABLES[role], run)
    ]
    return sorted(listed, key=lambda each: (-each["silent_s"], each["id"]))
