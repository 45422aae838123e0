"""Batches that workers collect, from when they are issued: what each is made of, and how far its episodes are."""

from __future__ import annotations

import json

import sqlalchemy as sa

from context.messages import canonical_json
from replay.storage.format.schema import planned_batches, tickets
from replay.storage.statements import insert
from replay.storage.validate import checked
from replay.ticket_records import FAILED, UNENDED, BatchProgress, PlannedBatch

_planned, _tickets = planned_batches.c, tickets.c


def remember(connection: sa.Connection, batch: PlannedBatch) -> None:
    """The plan of its tickets; the one that was issued first stays."""
    (row,) = checked([batch], "planned batch", "iteration")
    here = (_planned.run == batch.run) & (_planned.iteration == batch.iteration)
    if connection.execute(sa.select(_planned.iteration).where(here)).first() is None:
        insert(connection, planned_batches, [{**row, "plan": canonical_json(batch.plan)}])


def planned(connection: sa.Connection, run: str) -> list[PlannedBatch]:
    query = planned_batches.select().where(_planned.run == run).order_by(_planned.iteration)
    return [PlannedBatch(row.run, row.iteration, json.loads(row.plan)) for row in connection.execute(query)]


def planned_batch(connection: sa.Connection, run: str, iteration: int) -> PlannedBatch | None:
    here = (_planned.run == run) & (_planned.iteration == iteration)
    row = connection.execute(planned_batches.select().where(here)).one_or_none()
    return None if row is None else PlannedBatch(row.run, row.iteration, json.loads(row.plan))


def progress(connection: sa.Connection, run: str, iteration: int, purpose: str) -> BatchProgress:
    mine = (_tickets.run == run) & (_tickets.iteration == iteration) & (_tickets.purpose == purpose)
    ended = sa.func.count().filter(_tickets.state.not_in(UNENDED))
    failed = sa.func.count().filter(_tickets.state == FAILED)
    row = connection.execute(sa.select(sa.func.count(), ended, failed).where(mine)).one()
    return BatchProgress(*row)
