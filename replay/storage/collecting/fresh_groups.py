"""Which groups that workers collected are fresh in an update, and which are too late to be: those are for replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from replay.records import COMMITTED, ELIGIBLE, FRESH, RESERVED, WAITING, BatchRow, DrawRecord
from replay.storage.counters import is_live, set_state
from replay.storage.draws import reserve
from replay.storage.format.rows import chunked
from replay.storage.format.schema import draws, iterations, tickets, trajectories
from replay.storage.read import load, quarantine
from replay.ticket_records import DONE

_tickets, _rows = tickets.c, trajectories.c


@dataclass(frozen=True)
class FreshRequest:
    """The rows that are to be fresh in an iteration."""

    run: str
    iteration: int
    planned_for: int
    """The iteration that their batch was planned for: this one, or an earlier one where they took longer."""
    policy_version: int
    max_staleness: int
    """Most publishes between a row's oldest token and this update, also of weights that a resume took back."""


@dataclass(frozen=True)
class FreshDraw:
    rows: list[BatchRow] = field(default_factory=list)
    late: int = 0
    """Rows found to be late now."""


def draw_fresh(connection: sa.Connection, request: FreshRequest) -> FreshDraw:
    """Reserve the groups that are within the bound; those beyond it are eligible for replay from now on.

    Damaged rows are set aside, and their groups are smaller by them.
    """
    connection.execute(
        draws.delete().where(
            draws.c.run == request.run,
            draws.c.iteration == request.iteration,
            draws.c.state == RESERVED,
            draws.c.stream == FRESH,
        )
    )
    waiting = [list(rows) for _, rows in groupby(_waiting(connection, request), key=lambda row: int(row.number))]
    staleness = [max(abs(request.policy_version - row.policy_version_min) for row in rows) for rows in waiting]
    late = [rows for rows, age in zip(waiting, staleness, strict=True) if age > request.max_staleness]
    within = [rows for rows, age in zip(waiting, staleness, strict=True) if age <= request.max_staleness]
    _mark_late(connection, [row.id for rows in late for row in rows], request.policy_version)
    ids = [row.id for rows in within for row in rows]
    loaded = load(connection, ids)
    quarantine(connection, loaded.corrupt)
    rows = [loaded.whole[id] for id in ids if id in loaded.whole]
    records = [_record(request, slot, row.id, row.record.policy_version_min) for slot, row in enumerate(rows)]
    reserve(connection, records)
    taken = [
        BatchRow(row, record, advantage=row.record.advantage, reward=row.record.reward)
        for row, record in zip(rows, records, strict=True)
    ]
    return FreshDraw(taken, late=sum(map(len, late)))


def _record(request: FreshRequest, slot: int, id: str, version: int) -> DrawRecord:
    age = abs(request.policy_version - version)
    return DrawRecord(request.run, request.iteration, slot, id, FRESH, probability=None, staleness=age)


def _waiting(connection: sa.Connection, request: FreshRequest) -> list[Any]:
    """Rows of closed groups that no other iteration has reserved, in the order of their issue."""
    elsewhere = sa.exists().where(draws.c.trajectory == _rows.id, is_live())
    query = (
        sa.select(_tickets.number, _rows.id, _rows.policy_version_min)
        .join_from(trajectories, tickets, _tickets.trajectory == _rows.id)
        .where(_rows.run == request.run, _tickets.iteration == request.planned_for, _rows.state == WAITING, ~elsewhere)
    )
    return list(connection.execute(query.order_by(_tickets.number, _tickets.member)))


def _mark_late(connection: sa.Connection, ids: list[str], version: int) -> None:
    set_state(connection, ids, ELIGIBLE)
    for chunk in chunked(ids):
        connection.execute(tickets.update().where(_tickets.trajectory.in_(chunk)).values(late_at=version))


def take_back(connection: sa.Connection, run: str, iteration: int) -> int:
    """For a resume, before it rolls draws back: how many rows that were fresh or late since are to be fresh again."""
    stood = (iterations.c.run == run) & (iterations.c.iteration <= iteration)
    last = connection.scalar(sa.select(sa.func.max(iterations.c.policy_version)).where(stood))
    since = sa.exists().where(
        draws.c.trajectory == _rows.id,
        draws.c.run == run,
        draws.c.iteration > iteration,
        draws.c.state == COMMITTED,
        draws.c.stream == FRESH,
    )
    # An iteration ends with one publish: the run goes on with that version.
    late = _tickets.late_at > (0 if last is None else last + 1)
    query = sa.select(_rows.id).join_from(tickets, trajectories, _rows.id == _tickets.trajectory)
    query = query.where(_tickets.run == run, _tickets.state == DONE, _rows.state == ELIGIBLE, since | late)
    ids = list(connection.scalars(query.order_by(_rows.iteration, _rows.slot, _rows.id)))
    set_state(connection, ids, WAITING)
    connection.execute(tickets.update().where(_tickets.run == run, late).values(late_at=None))
    return len(ids)
