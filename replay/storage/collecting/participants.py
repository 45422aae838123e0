"""Who takes part in a run: its one learner, and the workers and engines that report themselves.

A silence is measured by the database's clock. It says who is gone; it never decides which rows an update learns from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from context.messages import canonical_json
from replay.errors import ReplayError, RunReplaced
from replay.storage.collecting.leases import free_tickets
from replay.storage.databases.clock import seconds_now
from replay.storage.format.schema import engines, runs, tickets, workers
from replay.ticket_records import Participant, RunView

TABLES = {"worker": workers, "engine": engines}
_ENGINES = engines.alias("listed_engines")
"""What is listed may be none: an alias may lack its columns."""


def report(connection: sa.Connection, table: sa.Table, run: str, id: str, facts: Mapping[str, Any]) -> None:
    """It is there now, and says this of itself."""
    seen = {"facts": canonical_json(facts), "seen_at": seconds_now()}
    here = (table.c.run == run) & (table.c.id == id)
    if not connection.execute(table.update().where(here).values(seen)).rowcount:
        connection.execute(table.insert().values(run=run, id=id, started_at=seconds_now(), **seen))


def leave(connection: sa.Connection, table: sa.Table, run: str, id: str) -> None:
    connection.execute(table.delete().where(table.c.run == run, table.c.id == id))


def list_participants(connection: sa.Connection, table: sa.Table, run: str) -> list[Participant]:
    query = sa.select(*participant_columns(table)).where(table.c.run == run)
    return [participant_of(row) for row in connection.execute(query.order_by(table.c.id))]


def participant_columns(table: sa.FromClause) -> tuple[sa.ColumnElement[Any], ...]:
    """What `participant_of` reads."""
    age, silence = (sa.type_coerce(seconds_now() - table.c[name], sa.Double) for name in ("started_at", "seen_at"))
    return table.c.id, table.c.facts, age.label("age"), silence.label("silence")


def participant_of(row: sa.Row[Any]) -> Participant:
    return Participant(row.id, json.loads(row.facts), row.age, row.silence)


def count(connection: sa.Connection, table: sa.Table, run: str, *, lease_s: float) -> int:
    there = (table.c.run == run) & (table.c.seen_at >= seconds_now() - lease_s)
    return connection.scalar(sa.select(sa.func.count()).select_from(table).where(there)) or 0


def view_run(connection: sa.Connection, run: str) -> RunView:
    """What workers ask again and again: one statement, for there may be a thousand of them."""
    free = free_tickets(run, tickets.c.number).limit(1).scalar_subquery().label("free")
    query = sa.select(runs.c.ended, free, *participant_columns(_ENGINES))
    listed = query.select_from(runs.outerjoin(_ENGINES, _ENGINES.c.run == runs.c.id)).where(runs.c.id == run)
    found = connection.execute(listed.order_by(_ENGINES.c.id)).all()
    return RunView(
        has_ended=any(row.ended for row in found),
        has_free_tickets=any(row.free is not None for row in found),
        engines=tuple(participant_of(row) for row in found if row.id is not None),
    )


def end_run(connection: sa.Connection, run: str, *, ended: bool) -> None:
    connection.execute(runs.update().where(runs.c.id == run).values(ended=ended))


def lead(connection: sa.Connection, run: str, leader: str, *, lease_s: float) -> None:
    """The run's learner from now on; raises ReplayError while another one counts as alive."""
    here = runs.c.id == run
    is_alive = sa.case((runs.c.leader_due >= seconds_now(), 1), else_=0).label("is_alive")
    found = connection.execute(sa.select(runs.c.leader, is_alive).where(here)).one_or_none()
    if found is None:
        raise ReplayError(f"run must be one that the database knows, got {run!r}. Add it first.")
    if found.leader not in (None, leader) and found.is_alive:
        raise ReplayError(
            f"run must have one learner, got {leader!r} while {found.leader!r} leads {run}. Stop that one, or wait "
            "until its lease is over."
        )
    connection.execute(runs.update().where(here).values(leader=leader, leader_due=seconds_now() + lease_s))


def still_leads(connection: sa.Connection, run: str, leader: str, *, lease_s: float) -> None:
    """Its lease begins anew; raises RunReplaced where another one has become the learner since."""
    mine = (runs.c.id == run) & (runs.c.leader == leader)
    if not connection.execute(runs.update().where(mine).values(leader_due=seconds_now() + lease_s)).rowcount:
        now_leads = connection.scalar(sa.select(runs.c.leader).where(runs.c.id == run))
        raise RunReplaced(
            f"run must have one learner, got {now_leads!r} in the place of {leader!r}, whose lease was over: {run} is "
            "the other one's. Let it go on."
        )


def stop_leading(connection: sa.Connection, run: str, leader: str) -> None:
    mine = (runs.c.id == run) & (runs.c.leader == leader)
    connection.execute(runs.update().where(mine).values(leader=None, leader_due=None))
