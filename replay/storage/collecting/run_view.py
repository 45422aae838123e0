"""What workers ask again and again, at one moment and in one small transaction."""

from __future__ import annotations

import sqlalchemy as sa

from replay.storage.collecting.leases import is_free
from replay.storage.collecting.participants import TABLES, count, has_ended, list_participants
from replay.storage.format.schema import tickets
from replay.ticket_records import RunView


def view_run(connection: sa.Connection, run: str) -> RunView:
    free = sa.select(tickets.c.number).where(is_free(run)).limit(1)
    return RunView(
        has_ended=has_ended(connection, run),
        has_free_tickets=connection.execute(free).first() is not None,
        workers=count(connection, TABLES["worker"], run),
        engines=tuple(list_participants(connection, TABLES["engine"], run)),
    )
