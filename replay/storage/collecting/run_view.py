"""What workers ask again and again: one statement, for there may be a thousand of them."""

from __future__ import annotations

import sqlalchemy as sa

from replay.storage.collecting.leases import is_free
from replay.storage.collecting.participants import TABLES, participant_columns, participant_of
from replay.storage.format.schema import runs
from replay.ticket_records import RunView

_ENGINES = TABLES["engine"].alias("listed_engines")
"""What is listed may be none: an alias may lack its columns."""


def view_run(connection: sa.Connection, run: str) -> RunView:
    has_free_tickets = sa.exists().where(is_free(run)).label("has_free_tickets")
    query = sa.select(runs.c.ended, has_free_tickets, *participant_columns(_ENGINES))
    listed = query.select_from(runs.outerjoin(_ENGINES, _ENGINES.c.run == runs.c.id)).where(runs.c.id == run)
    found = connection.execute(listed.order_by(_ENGINES.c.id)).all()
    return RunView(
        has_ended=any(row.ended for row in found),
        has_free_tickets=any(row.has_free_tickets for row in found),
        engines=tuple(participant_of(row) for row in found if row.id is not None),
    )
