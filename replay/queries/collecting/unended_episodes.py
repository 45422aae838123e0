"""Tickets that have not ended, the batch they are for, and why others failed.

All is counted by the database: a long run has a hundred thousand tickets and a few hundred under way.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from replay.queries.filters.query import QueryResult
from replay.storage.databases.clock import seconds_now
from replay.storage.format.schema import tickets
from replay.ticket_records import EVALUATION, FAILED, LEASED, QUEUED, REVOKED, TICKET_STATES, TRAIN, UNENDED

_ticket = tickets.c
_MOST_REASONS = 20
_LONGEST_REASON = 300
"""Characters: reasons that begin alike are counted together."""
# Only what is not closed can be under way, and of that there is an index.
_IN_LINE = (_ticket.purpose, _ticket.number, _ticket.member)
_UNDER_WAY = _ticket.closed_at.is_(None) & _ticket.state.in_(UNENDED)


def _seconds(expression: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
    return sa.type_coerce(expression, sa.Double)


def evaluation_states(connection: sa.Connection, run: str) -> tuple[QueryResult, int]:
    """Evaluation tickets by state; and how many tickets of either purpose were claimed more than once."""
    is_evaluation = _ticket.purpose == EVALUATION
    counts = {state: sa.func.count().filter(is_evaluation, _ticket.state == state) for state in TICKET_STATES}
    again = sa.func.count().filter(_ticket.tries > 1)
    *found, tried_again = connection.execute(sa.select(*counts.values(), again).where(_ticket.run == run)).one()
    return dict(zip(counts, found, strict=True)), tried_again


def oldest(connection: sa.Connection, run: str) -> dict[str, QueryResult | None]:
    """The first of those that are queued, and of those that a worker holds: evaluations, then in the order of issue."""
    return {state: _oldest(connection, run, _ticket.state == state) for state in (QUEUED, LEASED)}


def first_wanted(connection: sa.Connection, run: str, batch: int | None) -> QueryResult | None:
    """The oldest evaluation; if there is none under way, the oldest episode of that batch."""
    return _oldest(connection, run, (_ticket.purpose == EVALUATION) | (_ticket.iteration == batch))


def _oldest(connection: sa.Connection, run: str, *conditions: sa.ColumnElement[bool]) -> QueryResult | None:
    """`age_s` is since its issue, `lease_s` what is left of its lease: below 0 the lease is over."""
    columns = [_ticket[name] for name in ("number", "member", "iteration", "purpose", "state", "holder", "tries")]
    age, left = _seconds(seconds_now() - _ticket.issued_at), _seconds(_ticket.due - seconds_now())
    query = sa.select(*columns, age.label("age_s"), left.label("lease_s"))
    query = query.where(_ticket.run == run, _UNDER_WAY, *conditions).order_by(*_IN_LINE).limit(1)
    found = connection.execute(query).mappings().one_or_none()
    return None if found is None else {**found, "age_s": max(0.0, found["age_s"])}


def held(connection: sa.Connection, run: str) -> dict[str, int]:
    """How many tickets are leased, by holder."""
    query = sa.select(_ticket.holder, sa.func.count()).where(_ticket.run == run, _UNDER_WAY, _ticket.state == LEASED)
    return {holder: count for holder, count in connection.execute(query.group_by(_ticket.holder)) if holder is not None}


def open_batch(connection: sa.Connection, run: str) -> QueryResult | None:
    """The first planned batch that the learner has not taken, with the groups of it that lack an episode."""
    mine = (_ticket.run == run) & (_ticket.purpose == TRAIN)
    number = connection.scalar(sa.select(sa.func.min(_ticket.iteration)).where(mine, _ticket.closed_at.is_(None)))
    if number is None:
        return None
    planned = mine & (_ticket.iteration == number)
    groups = sa.select(sa.func.count(sa.distinct(_ticket.number)))
    return {
        "number": number,
        "groups": connection.scalar(groups.where(planned)) or 0,
        "missing_groups": connection.scalar(groups.where(planned, _UNDER_WAY)) or 0,
    }


def end_reasons(connection: sa.Connection, run: str) -> list[QueryResult]:
    """Why episodes ended without a row, the most frequent reasons first."""
    ended = (_ticket.run == run) & _ticket.state.in_((FAILED, REVOKED))
    reason, count = sa.func.substr(_ticket.reason, 1, _LONGEST_REASON), sa.func.count()
    query = sa.select(_ticket.state, reason.label("reason"), count.label("count")).where(ended)
    query = query.group_by(_ticket.state, reason).order_by(count.desc(), _ticket.state, reason)
    return [dict(row) for row in connection.execute(query.limit(_MOST_REASONS)).mappings()]
