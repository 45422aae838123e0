"""A run that workers collect: who takes part, where every episode is, and who waits for whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from context.wording import excerpt
from replay.questions.filters.query import QueryResult
from replay.questions.who_waits import Standing, who_waits
from replay.records import RESERVED, RunRecord, stored_setting
from replay.storage.collecting.participants import TABLES, list_participants
from replay.storage.collecting.tickets import count_tickets
from replay.storage.format.schema import draws, iterations, runs, tickets, workers
from replay.storage.statements import seconds_now
from replay.store import ReplayStore
from replay.ticket_records import EVALUATION, FAILED, LEASED, QUEUED, REVOKED, TICKET_STATES, TRAIN, UNENDED

PARTS = ("fresh", "late", "unused", "waiting", "open")
"""What can become of a finished training episode; the counts add up to those that are done."""
_LEASE_S = 60.0
"""Seconds: the lease where a configuration does not say."""
_MOST_REASONS = 20
_LONGEST_TEXT = 300
"""Characters of a reason, or of a fact that somebody reports; reasons that begin alike are counted together."""
_GREATEST = 2**53
_ticket = tickets.c
# Only what is not closed can be under way, and of that there is an index.
_UNDER_WAY = _ticket.closed_at.is_(None) & _ticket.state.in_(UNENDED)


def cluster(store: ReplayStore, run: RunRecord) -> QueryResult:
    """The run at one moment, over all iterations: `waits`, `leader`, `workers` and `engines`, and counts of episodes.

    `counts` are of training tickets, and `adds_up` where nothing that was acknowledged is lost: the finished ones are
    the sum of what became of their rows. `late_share` is of the rows that were to be fresh and are not waited for.
    Ages are in seconds by the database's clock. Participants that have been silent for longest come first.
    """
    lease_s = stored_setting(run.config, "collection.lease_s", float) or _LEASE_S
    id = run.id
    with store.reading() as connection:
        counts, evaluations = count_tickets(connection, id), _evaluation_states(connection, id)
        last = sa.select(sa.func.max(iterations.c.iteration)).where(iterations.c.run == id)
        newest = connection.scalar(last) or 0
        ended, leader = _leader(connection, id)
        batch = _open_batch(connection, id)
        standing = Standing(
            ended=ended,
            leader=leader,
            iteration=newest + 1,
            is_updating=_is_updating(connection, id, newest + 1),
            batch=batch,
            evaluations=evaluations[QUEUED] + evaluations[LEASED],
            under_way=counts.queued + counts.leased + evaluations[QUEUED] + evaluations[LEASED],
            issued=sum(getattr(counts, state) + evaluations[state] for state in TICKET_STATES),
            workers=_workers(connection, id, lease_s=lease_s),
            engines=_participants(connection, id, "engine", _ENGINE),
        )
        used = counts.fresh + counts.late
        return {
            "run": id,
            "by_workers": _has_any(connection, run),
            "ended": ended,
            "iteration": newest,
            "waits": who_waits(standing)._asdict(),
            "leader": leader,
            "lease_s": lease_s,
            "workers": list(standing.workers),
            "engines": list(standing.engines),
            "counts": {**asdict(counts), "rows": counts.rows, "adds_up": counts.rows == counts.done},
            "late_share": counts.late / used if used else None,
            "evaluations": evaluations,
            "reasons": _end_reasons(connection, id),
        }


def is_collected_by_workers(store: ReplayStore, run: RunRecord) -> bool:
    """True if anybody but the training process collects the run. The process's own engines report themselves too."""
    with store.reading() as connection:
        return _has_any(connection, run)


def _has_any(connection: sa.Connection, run: RunRecord) -> bool:
    if stored_setting(run.config, "collection.by", str) == "workers":
        return True
    return any(connection.scalar(sa.select(sa.exists().where(table.c.run == run.id))) for table in (tickets, workers))


def _leader(connection: sa.Connection, run: str) -> tuple[bool, QueryResult | None]:
    """True if the run has ended; and its learner, with the seconds its lease still holds, below 0 where it is over."""
    left: Any = sa.type_coerce(runs.c.leader_due - seconds_now(), sa.Double)
    ended, id, lease_s = connection.execute(sa.select(runs.c.ended, runs.c.leader, left).where(runs.c.id == run)).one()
    known = id is not None and lease_s is not None
    return bool(ended), {"id": id, "lease_s": lease_s, "holds": lease_s >= 0} if known else None


def _is_updating(connection: sa.Connection, run: str, iteration: int) -> bool:
    """True if the rows of that iteration's batch are reserved: the learner has what it needs."""
    reserved = (draws.c.run == run) & (draws.c.iteration == iteration) & (draws.c.state == RESERVED)
    return connection.execute(sa.select(draws.c.slot).where(reserved).limit(1)).first() is not None


def _evaluation_states(connection: sa.Connection, run: str) -> dict[str, int]:
    """The number of evaluation tickets by state."""
    counts = [sa.func.count().filter(_ticket.state == state) for state in TICKET_STATES]
    query = sa.select(*counts).where(_ticket.run == run, _ticket.purpose == EVALUATION)
    return dict(zip(TICKET_STATES, connection.execute(query).one(), strict=True))


def _open_batch(connection: sa.Connection, run: str) -> QueryResult | None:
    """The first planned batch that the learner has not taken, and how many of its groups lack an episode."""
    mine = (_ticket.run == run) & (_ticket.purpose == TRAIN)
    number = connection.scalar(sa.select(sa.func.min(_ticket.iteration)).where(mine, _ticket.closed_at.is_(None)))
    if number is None:
        return None
    planned = mine & (_ticket.iteration == number)
    groups = sa.select(sa.func.count(sa.distinct(_ticket.number)))
    whole, missing = connection.scalar(groups.where(planned)), connection.scalar(groups.where(planned, _UNDER_WAY))
    return {"number": number, "groups": whole or 0, "missing_groups": missing or 0}


def _end_reasons(connection: sa.Connection, run: str) -> list[QueryResult]:
    """Why episodes ended without a row, the most frequent reasons first."""
    ended = (_ticket.run == run) & _ticket.state.in_((FAILED, REVOKED))
    reason, count = sa.func.substr(_ticket.reason, 1, _LONGEST_TEXT), sa.func.count()
    query = sa.select(_ticket.state, reason.label("reason"), count.label("count")).where(ended)
    query = query.group_by(_ticket.state, reason).order_by(count.desc(), _ticket.state, reason)
    return [dict(row) for row in connection.execute(query.limit(_MOST_REASONS)).mappings()]


# Participants report what they like of themselves, so a fact of another kind than it should have is unknown.


def _text(value: Any) -> str | None:
    return excerpt(value, _LONGEST_TEXT) if isinstance(value, str) and value else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < _GREATEST else None


def _real(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) and abs(value) < _GREATEST else None


_Kinds = Mapping[str, Callable[[Any], Any]]
_WORKER: _Kinds = {
    **dict.fromkeys(("host", "state"), _text),
    **dict.fromkeys(("pid", "concurrency", "in_flight", "done", "failed", "tool_errors"), _whole),
}
_ENGINE: _Kinds = {
    **dict.fromkeys(("state", "label", "adapter", "model"), _text),
    "version": _whole,
    "difference": _real,  # root mean square of probed log-probs, in nats: the proof of the weights that are served
}


def _workers(connection: sa.Connection, run: str, *, lease_s: float) -> list[QueryResult]:
    """All that did not leave; `leased` are the tickets that a worker holds, whatever it reports."""
    query = sa.select(_ticket.holder, sa.func.count()).where(_ticket.run == run, _UNDER_WAY, _ticket.state == LEASED)
    held = {str(holder): count for holder, count in connection.execute(query.group_by(_ticket.holder))}
    listed = _participants(connection, run, "worker", _WORKER, lease_s=lease_s)
    return [{**each, "leased": held.get(each["id"], 0)} for each in listed]


def _participants(
    connection: sa.Connection, run: str, role: str, kinds: _Kinds, *, lease_s: float = math.inf
) -> list[QueryResult]:
    listed = [
        {
            "id": each.id,
            **{name: kind(each.facts.get(name)) for name, kind in kinds.items()},
            "silent_s": max(0.0, each.silent_s),
            "age_s": max(0.0, each.age_s),
            "gone": each.is_gone(lease_s),
        }
        for each in list_participants(connection, TABLES[role], run)
    ]
    return sorted(listed, key=lambda each: (-each["silent_s"], each["id"]))
