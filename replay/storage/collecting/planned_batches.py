"""Batches that workers collect, from when they are issued: what each is made of, and where every episode of it is."""

from __future__ import annotations

import json

import sqlalchemy as sa

from context.messages import canonical_json
from replay.records import COMMITTED, FRESH, OPEN_GROUP, WAITING
from replay.storage.format.schema import draws, iterations, planned_batches, reclaimed, tickets, trajectories
from replay.storage.statements import insert
from replay.storage.validate import checked
from replay.ticket_records import DONE, FAILED, TICKET_STATES, TRAIN, UNENDED, PlannedBatch, TicketCounts

_planned, _tickets, _rows = planned_batches.c, tickets.c, trajectories.c


def remember(connection: sa.Connection, batch: PlannedBatch) -> None:
    """The plan of its tickets; the one that was issued first stays."""
    (row,) = checked([batch], "planned batch", "iteration")
    here = (_planned.run == batch.run) & (_planned.iteration == batch.iteration)
    if connection.execute(sa.select(_planned.iteration).where(here)).first() is None:
        insert(connection, planned_batches, [{**row, "plan": canonical_json(batch.plan)}])


def planned(connection: sa.Connection, run: str, *, after: int) -> list[PlannedBatch]:
    query = planned_batches.select().where(_planned.run == run, _planned.iteration > after)
    found = connection.execute(query.order_by(_planned.iteration))
    return [PlannedBatch(row.run, row.iteration, json.loads(row.plan)) for row in found]


def planned_batch(connection: sa.Connection, run: str, iteration: int) -> PlannedBatch | None:
    here = (_planned.run == run) & (_planned.iteration == iteration)
    row = connection.execute(planned_batches.select().where(here)).one_or_none()
    return None if row is None else PlannedBatch(row.run, row.iteration, json.loads(row.plan))


def episodes(connection: sa.Connection, run: str, iteration: int, purpose: str) -> int:
    mine = (_tickets.run == run) & (_tickets.iteration == iteration) & (_tickets.purpose == purpose)
    return connection.scalar(sa.select(sa.func.count()).where(mine)) or 0


def under_way(connection: sa.Connection, run: str, iteration: int, purpose: str) -> int:
    """How many of them have not ended: asked again and again, of the index of unclosed tickets."""
    unclosed = (_tickets.run == run) & (_tickets.purpose == purpose) & _tickets.closed_at.is_(None)
    unended = _tickets.state.in_(UNENDED) & (_tickets.iteration == iteration)
    return connection.scalar(sa.select(sa.func.count()).where(unclosed, unended)) or 0


def has_failed(connection: sa.Connection, run: str, iteration: int) -> bool:
    mine = (_tickets.run == run) & (_tickets.iteration == iteration) & (_tickets.purpose == TRAIN)
    return set(connection.scalars(sa.select(_tickets.state).where(mine).distinct())) == {FAILED}


_IN_A_BATCH = sa.exists().where(
    draws.c.trajectory == _tickets.trajectory,
    draws.c.run == _tickets.run,
    draws.c.state == COMMITTED,
    draws.c.stream == FRESH,
)


_HAS_ENDED = sa.or_(
    sa.exists().where(_rows.id == _tickets.trajectory, _rows.state.not_in([OPEN_GROUP, WAITING])),
    sa.exists().where(reclaimed.c.id == _tickets.trajectory),
)
_IS_LATE = _tickets.late_at.is_not(None)
_UNDONE = tuple(state for state in TICKET_STATES if state != DONE)
_BOTH, _UNDECIDED = "both", "undecided"
_PLACE = sa.case(
    (_tickets.state != DONE, _tickets.state),
    (_IN_A_BATCH, sa.case((_IS_LATE, _BOTH), else_="fresh")),
    (_IS_LATE, "late"),
    (_HAS_ENDED, "unused"),
    else_=_UNDECIDED,
)


def count_tickets(connection: sa.Connection, run: str) -> TicketCounts:
    """All of one moment where the connection has one consistent view."""
    # With an offset the database looks for a ticket's row and draws once, not again for every use of the column.
    places = sa.select(_PLACE.label("place")).where(_tickets.run == run, _tickets.purpose == TRAIN).offset(0).subquery()
    query = sa.select(places.c.place, sa.func.count()).group_by(places.c.place)
    found = {place: int(count) for place, count in connection.execute(query)}
    unfinished = (_rows.run == run) & _rows.state.in_([WAITING, OPEN_GROUP])
    rows = sa.select(_rows.state, sa.func.count()).where(unfinished).group_by(_rows.state)
    states = {state: int(count) for state, count in connection.execute(rows)}
    both = found.get(_BOTH, 0)
    return TicketCounts(
        **{state: found.get(state, 0) for state in _UNDONE},
        done=sum(count for place, count in found.items() if place not in _UNDONE),
        fresh=found.get("fresh", 0) + both,
        late=found.get("late", 0) + both,
        unused=found.get("unused", 0),
        waiting=states.get(WAITING, 0),
        open=states.get(OPEN_GROUP, 0),
    )


def count_uses(connection: sa.Connection, run: str) -> tuple[int, int]:
    """Rows of all committed batches, fresh and replayed; and the training episodes that are done."""
    sums = sa.func.sum(iterations.c.fresh + iterations.c.replay)
    done = (_tickets.run == run) & (_tickets.purpose == TRAIN) & (_tickets.state == DONE)
    learned = connection.scalar(sa.select(sums).where(iterations.c.run == run))
    return int(learned or 0), connection.scalar(sa.select(sa.func.count()).where(done)) or 0
