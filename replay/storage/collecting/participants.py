"""The participants of a run: its one learner, and the workers and engines that report themselves. The database's clock
measures who has been silent too long. It never decides which rows an update learns from."""

import json
from collections.abc import Mapping
from typing import Any, Literal

import sqlalchemy as sa

from context.messages import canonical_json
from replay.errors import ReplayError, RunReplaced
from replay.storage.collecting.leases import free_tickets, lasts
from replay.storage.collecting.ticket_records import Participant, RunView
from replay.storage.databases import Database, retried
from replay.storage.format.schema import engines, runs, tickets, workers
from replay.storage.statements import seconds_now

Role = Literal["worker", "engine"]
TABLES = {"worker": workers, "engine": engines}


class Roles:
    """The part of the store for participants. Every method is one transaction, and may be repeated."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def report(self, role: Role, run: str, id: str, facts: Mapping[str, Any]) -> None:
        """Store that a worker or an engine is alive, with facts about itself."""
        table = TABLES[role]
        seen = {"facts": canonical_json(facts), "seen_at": seconds_now()}
        here = (table.c.run == run) & (table.c.id == id)

        def work(connection: sa.Connection) -> None:
            if not connection.execute(table.update().where(here).values(seen)).rowcount:
                connection.execute(table.insert().values(run=run, id=id, started_at=seconds_now(), **seen))

        self._database.write_rows(work)

    def leave(self, role: Role, run: str, id: str) -> None:
        """Forget a worker or an engine that stops in order."""
        table = TABLES[role]
        self._write(table.delete().where(table.c.run == run, table.c.id == id))

    def listed(self, role: Role, run: str) -> list[Participant]:
        """All participants that reported themselves and did not leave, with the time of their silence."""
        return self._database.read(lambda connection: list_participants(connection, TABLES[role], run))

    def view(self, run: str, *, lease_s: float) -> RunView:
        """The facts a worker polls: whether there is work, and which engines there are."""
        ended = sa.select(runs.c.ended).where(runs.c.id == run)
        free = free_tickets(run, tickets.c.number, lease_s=lease_s).limit(1)

        def ask(connection: sa.Connection) -> RunView:
            return RunView(
                has_ended=bool(connection.scalar(ended)),
                has_free_tickets=connection.scalar(free) is not None,
                engines=tuple(list_participants(connection, engines, run)),
            )

        return self._database.read(ask)

    def end_run(self, run: str, *, ended: bool = True) -> None:
        """Mark the run as ended, so that its participants leave; a run that continues sets `ended` to False."""
        self._write(runs.update().where(runs.c.id == run).values(ended=ended))

    def lead(self, run: str, leader: str, *, lease_s: float) -> None:
        """Make `leader` the run's one learner. Raises ReplayError while another learner's lease is running.

        The leader must still resume the run: that takes the right to write from the learner before (`RunReplaced`).
        """
        here = runs.c.id == run
        is_alive = sa.case((lasts(runs.c.leader_due, lease_s), 1), else_=0).label("is_alive")

        def work(connection: sa.Connection) -> None:
            found = connection.execute(sa.select(runs.c.leader, is_alive).where(here)).one_or_none()
            if found is not None and found.leader not in (None, leader) and found.is_alive:
                raise ReplayError(
                    f"run must have one learner, got {leader!r} while {found.leader!r} leads {run}. Stop that learner, "
                    "or wait until its lease is over."
                )
            connection.execute(runs.update().where(here).values(leader=leader, leader_due=seconds_now() + lease_s))

        retried(lambda: self._database.write(work))

    def still_leads(self, run: str, leader: str, *, lease_s: float) -> None:
        """Renew the learner's lease. Raises RunReplaced if another learner took its place."""
        mine = (runs.c.id == run) & (runs.c.leader == leader)

        def work(connection: sa.Connection) -> None:
            if not connection.execute(runs.update().where(mine).values(leader_due=seconds_now() + lease_s)).rowcount:
                now_leads = connection.scalar(sa.select(runs.c.leader).where(runs.c.id == run))
                raise RunReplaced(
                    f"run must have one learner, got {now_leads!r} in the place of {leader!r}, whose lease was over. "
                    f"Let {now_leads!r} continue {run}."
                )

        self._database.write_rows(work)

    def stop_leading(self, run: str, leader: str) -> None:
        """End the learner's lease, so that the next learner need not wait for it."""
        mine = (runs.c.id == run) & (runs.c.leader == leader)
        self._write(runs.update().where(mine).values(leader=None, leader_due=None))

    def _write(self, statement: sa.Executable) -> None:
        self._database.write_rows(lambda connection: connection.execute(statement))


def list_participants(connection: sa.Connection, table: sa.Table, run: str) -> list[Participant]:
    age, silence = (sa.type_coerce(seconds_now() - table.c[name], sa.Double) for name in ("started_at", "seen_at"))
    query = sa.select(table.c.id, table.c.facts, age, silence).where(table.c.run == run).order_by(table.c.id)
    found = connection.execute(query).all()
    return [Participant(id, json.loads(facts), age_s, silent_s) for id, facts, age_s, silent_s in found]
