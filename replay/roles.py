"""`Roles`: who takes part in a run, as a part of the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import sqlalchemy as sa

from replay.storage.collecting import participants
from replay.storage.collecting.participants import TABLES
from replay.storage.databases import Database, Result, retried
from replay.ticket_records import Participant, RunView

Role = Literal["worker", "engine"]


class Roles:
    """Every method is one transaction, and may be done again."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._beside = database.write_beside

    def report(self, role: Role, run: str, id: str, facts: Mapping[str, Any]) -> None:
        """A worker or an engine is alive, and says this of itself; at its first time it becomes known."""
        self._ask(lambda connection: participants.report(connection, TABLES[role], run, id, facts))

    def leave(self, role: Role, run: str, id: str) -> None:
        """It stops in order, and is forgotten."""
        self._beside(lambda connection: participants.leave(connection, TABLES[role], run, id))

    def listed(self, role: Role, run: str) -> list[Participant]:
        """All that reported themselves and did not leave, with how long they have been silent."""
        return self._database.read(lambda connection: participants.list_participants(connection, TABLES[role], run))

    def count(self, role: Role, run: str, *, lease_s: float) -> int:
        """How many have reported themselves within a lease."""
        return self._ask(lambda connection: participants.count(connection, TABLES[role], run, lease_s=lease_s))

    def view(self, run: str) -> RunView:
        """What a worker looks at: whether there is something to do, and with which engines."""
        return self._ask(lambda connection: participants.view_run(connection, run))

    def end_run(self, run: str, *, ended: bool = True) -> None:
        """Everybody who takes part in the run leaves it, until it is gone on with (`ended` false)."""
        self._beside(lambda connection: participants.end_run(connection, run, ended=ended))

    def lead(self, run: str, leader: str, *, lease_s: float) -> None:
        """`leader` is the run's one learner; raises ReplayError while another one's lease is not over.

        Who leads still has to resume the run: that takes the right to write it from the one before (`RunReplaced`).
        """

        def work(connection: sa.Connection) -> None:
            participants.lead(connection, run, leader, lease_s=lease_s)

        retried(lambda: self._database.write(work))

    def still_leads(self, run: str, leader: str, *, lease_s: float) -> None:
        """The lease begins anew; raises RunReplaced where another learner took its place."""
        self._beside(lambda connection: participants.still_leads(connection, run, leader, lease_s=lease_s))

    def stop_leading(self, run: str, leader: str) -> None:
        """The next learner need not wait for the lease."""
        self._beside(lambda connection: participants.stop_leading(connection, run, leader))

    def _ask(self, question: Callable[[sa.Connection], Result]) -> Result:
        """What is asked so often that a server should have little of it."""

        def asked() -> Result:
            with self._database.one_statement() as connection:
                return question(connection)

        return retried(asked)
