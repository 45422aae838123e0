"""Batches that workers collect, from when they are issued: what each is made of, and how far its episodes are."""

from __future__ import annotations

import json

import sqlalchemy as sa

from context.messages import canonical_json
from replay.storage.format.schema import planned_batches, tickets
from replay.storage.statements import insert
from replay.storage.validate import checked
from replay.ticket_records import FAILED, TRAIN, UNENDED, PlannedBatch

_planned, _tickets = planned_batches.c, tickets.c


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
