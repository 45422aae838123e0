"""Where every finished episode is: nothing that was acknowledged is lost, and nothing is discarded."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from replay.records import COMMITTED, FRESH, OPEN_GROUP, WAITING
from replay.storage.format.schema import draws, iterations, reclaimed, tickets, trajectories
from replay.ticket_records import DONE, TICKET_STATES, TRAIN, TicketCounts

_tickets, _rows = tickets.c, trajectories.c

_IN_A_BATCH = sa.exists().where(
    draws.c.trajectory == _tickets.trajectory,
    draws.c.run == _tickets.run,
    draws.c.state == COMMITTED,
    draws.c.stream == FRESH,
)


def count_tickets(connection: sa.Connection, run: str) -> TicketCounts:
    """One statement, so that all counts are of one moment."""
    mine = (_tickets.run == run) & (_tickets.purpose == TRAIN)
    columns = (_tickets.state, _tickets.trajectory, _tickets.late_at.is_not(None).label("is_late"))
    in_a_batch = sa.case((_tickets.state == DONE, _IN_A_BATCH), else_=sa.false()).label("in_a_batch")
    # With an offset the draws are looked up once for each ticket, not for every count that asks.
    one = sa.select(*columns, in_a_batch).where(mine).offset(0).subquery().c

    def of_tickets(*conditions: sa.ColumnElement[bool]) -> sa.ColumnElement[Any]:
        return sa.func.count().filter(sa.and_(*conditions))

    def of_rows(state: str) -> sa.ColumnElement[Any]:
        return sa.select(sa.func.count()).where(_rows.run == run, _rows.state == state).scalar_subquery()

    is_done = one.state == DONE
    has_ended = sa.or_(
        sa.exists().where(_rows.id == one.trajectory, _rows.state.not_in([OPEN_GROUP, WAITING])),
        sa.exists().where(reclaimed.c.id == one.trajectory),
    )
    counts = {state: of_tickets(one.state == state) for state in TICKET_STATES}
    counts["fresh"] = of_tickets(is_done, one.in_a_batch)
    counts["late"] = of_tickets(is_done, one.is_late)
    counts["unused"] = of_tickets(is_done, ~one.in_a_batch, ~one.is_late, has_ended)
    counts["waiting"], counts["open"] = of_rows(WAITING), of_rows(OPEN_GROUP)
    found = connection.execute(sa.select(*(count.label(name) for name, count in counts.items()))).mappings().one()
    return TicketCounts(**{name: int(found[name]) for name in counts})


def count_samples(connection: sa.Connection, run: str) -> int:
    """Rows of all committed batches, fresh and replayed."""
    sums = sa.func.sum(iterations.c.fresh + iterations.c.replay)
    return int(connection.scalar(sa.select(sums).where(iterations.c.run == run)) or 0)


def last_number(connection: sa.Connection, run: str) -> int | None:
    """Of the groups that were ever issued for the run; None: none was."""
    found = connection.scalar(sa.select(sa.func.max(_tickets.number)).where(_tickets.run == run))
    return None if found is None else int(found)
