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


_HAS_ENDED = sa.or_(
    sa.exists().where(_rows.id == _tickets.trajectory, _rows.state.not_in([OPEN_GROUP, WAITING])),
    sa.exists().where(reclaimed.c.id == _tickets.trajectory),
)
_IS_LATE = _tickets.late_at.is_not(None)
_OUTCOME = sa.case(
    (_tickets.state != DONE, None),
    (_IN_A_BATCH, "fresh"),
    (_IS_LATE, None),
    (_HAS_ENDED, "unused"),
    else_=None,
)


def count_tickets(connection: sa.Connection, run: str) -> TicketCounts:
    """One statement, so that all counts are of one moment."""
    mine = (_tickets.run == run) & (_tickets.purpose == TRAIN)
    columns = (_tickets.state, _IS_LATE.label("is_late"), _OUTCOME.label("outcome"))
    # With an offset the database looks for a ticket's row and draws once, not again for every count.
    one = sa.select(*columns).where(mine).offset(0).subquery().c

    def of_tickets(*conditions: sa.ColumnElement[bool]) -> sa.ColumnElement[Any]:
        return sa.func.count().filter(sa.and_(*conditions))

    def of_rows(state: str) -> sa.ColumnElement[Any]:
        return sa.select(sa.func.count()).where(_rows.run == run, _rows.state == state).scalar_subquery()

    counts = {state: of_tickets(one.state == state) for state in TICKET_STATES}
    counts |= {outcome: of_tickets(one.outcome == outcome) for outcome in ("fresh", "unused")}
    counts["late"] = of_tickets(one.state == DONE, one.is_late)
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
