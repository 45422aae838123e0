"""`Tickets`: the episodes that workers collect for a run, as a part of the store.

The learner issues them, closes groups and draws fresh ones; workers claim, extend and finish. A learner's writes check
that nobody else has resumed the run, a worker's check its claim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import sqlalchemy as sa

from context.authors import AuthorTable
from replay.records import HeldOutEpisode, TaskRecord, Trajectory
from replay.sampling.staleness import may_be_fresh
from replay.storage import write
from replay.storage.collecting import finish, fresh_groups, leases, planned_batches
from replay.storage.collecting.fresh_groups import FreshDraw, FreshRequest
from replay.storage.databases import Database, Result
from replay.ticket_records import (
    TRAIN,
    Claim,
    EndedGroup,
    Place,
    PlannedBatch,
    Purpose,
    TicketCounts,
    TicketRecord,
)

Lost = dict[Place, str]
"""States of tickets that a claim holds no more, by number and member: `revoked`, or ended or claimed by another."""


class _Write(Protocol):
    def __call__(self, work: Callable[[sa.Connection], Result], *runs: str) -> Result: ...


class Tickets:
    """Every method is one transaction: done when it returns, not begun when it raises. All may be done again."""

    def __init__(self, database: Database, write: _Write, authors: Callable[[str], AuthorTable]) -> None:
        """`write` checks that nobody else has resumed the runs it is given."""
        self._database = database
        self._beside = database.write_beside
        self._write = write
        self._authors = authors

    def issue(
        self, tasks: Sequence[TaskRecord], tickets: Sequence[TicketRecord], batch: PlannedBatch | None = None
    ) -> int:
        """How many are new. A group is issued whole, its number greater than all before.

        `batch` is what the tickets are for; it stays as it was first issued.
        """
        runs = {ticket.run for ticket in tickets} | ({batch.run} if batch else set())

        def work(connection: sa.Connection) -> int:
            if batch is not None:
                planned_batches.remember(connection, batch)
            return leases.issue(connection, tasks, tickets)

        return self._write(work, *runs)

    def planned(self, run: str, *, after: int) -> list[PlannedBatch]:
        """The batches that were issued for iterations after this one, in order."""
        return self._database.read(lambda connection: planned_batches.planned(connection, run, after=after))

    def planned_batch(self, run: str, iteration: int) -> PlannedBatch | None:
        """The one that was issued for an iteration; None: none was."""
        return self._database.read(lambda connection: planned_batches.planned_batch(connection, run, iteration))

    def episodes(self, run: str, iteration: int, purpose: Purpose = TRAIN) -> int:
        """How many were issued for an iteration."""
        return self._database.read(lambda connection: planned_batches.episodes(connection, run, iteration, purpose))

    def under_way(self, run: str, iteration: int, purpose: Purpose = TRAIN) -> int:
        """How many of them have not ended."""
        return self._database.read(lambda connection: planned_batches.under_way(connection, run, iteration, purpose))

    def has_failed(self, run: str, iteration: int) -> bool:
        """Whether nothing was collected of the batch that was issued for an iteration, and nothing will be."""
        return self._database.read(lambda connection: planned_batches.has_failed(connection, run, iteration))

    def claim(self, run: str, holder: str, *, count: int, lease_s: float) -> list[Claim]:
        """Up to `count` episodes to collect, evaluations first, then the oldest, each for `lease_s` seconds.

        A claim whose answer is lost holds tickets that nobody extends: they are free again when the lease is over.
        """
        return self._beside(lambda connection: leases.claim(connection, run, holder, count=count, lease_s=lease_s))

    def extend(self, claims: Sequence[Claim], *, lease_s: float) -> Lost:
        """A heartbeat: the leases begin anew, but for those that are lost and need not be gone on with."""
        return self._beside(lambda connection: leases.extend(connection, claims, lease_s=lease_s))

    def give_back(self, claims: Sequence[Claim]) -> Lost:
        """A worker that stops in order: others may claim them at once, and no try is counted."""
        return self._beside(lambda connection: leases.give_back(connection, claims))

    def fail(self, claims: Sequence[Claim], reason: str) -> Lost:
        """They end without a row, and their groups are smaller by them."""
        return self._beside(lambda connection: leases.fail(connection, claims, reason))

    def finish(self, finished: Sequence[tuple[Claim, Trajectory]]) -> list[bool]:
        """Store what was collected, and end the tickets; whether each counts, or another was first.

        A trajectory has the run, task, iteration and member of its ticket. One that does not count is not stored.
        """
        if not finished:
            return []
        claims, rows = [claim for claim, _ in finished], [row for _, row in finished]
        tables = {run: self._authors(run) for run in {row.record.run for row in rows}}
        prepared = write.prepare([], [], rows, tables, compress_text=self._database.compresses_text)
        ids = [row.id for row in rows]
        # Who resumes the run does not end its workers: only the tickets decide.
        return self._write(lambda connection: finish.finish(connection, claims, prepared, ids))

    def finish_evaluation(
        self, claim: Claim, outcome: Mapping[str, Any], episode: HeldOutEpisode | None = None
    ) -> bool:
        """Whether it counts; `outcome` is for the learner, and the `episode` is kept apart from what is drawn."""
        compressed = self._database.compresses_text
        return self._beside(
            lambda connection: finish.finish_evaluation(connection, claim, outcome, episode, compressed=compressed)
        )

    def revoke(self, run: str, purpose: Purpose, reason: str) -> int:
        """The learner wants no more episodes for this purpose: how many had not ended."""
        return self._write(lambda connection: leases.revoke(connection, run, purpose, reason), run)

    def ended_groups(self, run: str, purpose: Purpose = TRAIN) -> list[EndedGroup]:
        """What the learner may close now, oldest first."""
        return self._database.read(lambda connection: fresh_groups.ended_groups(connection, run, purpose))

    def open_rows(self, run: str, numbers: Sequence[int]) -> list[Trajectory]:
        """What closing these groups needs the advantages of, in the order of issue; damaged rows are set aside."""
        return self._write(lambda connection: fresh_groups.open_rows(connection, run, numbers), run)

    def close_groups(
        self, run: str, numbers: Sequence[int], advantages: Mapping[str, float], *, policy_version: int
    ) -> None:
        """Give the open rows of these groups their advantages, by id: from now on they wait to be fresh once.

        Raises InvalidRecord where a member has not ended.
        """

        def work(connection: sa.Connection) -> None:
            fresh_groups.close_groups(connection, run, numbers, advantages, policy_version=policy_version)

        self._write(work, run)

    def draw_fresh(self, request: FreshRequest) -> FreshDraw:
        """Reserve the rows of a planned batch; groups beyond the bound become eligible for replay, counted as late."""
        return self._write(lambda connection: fresh_groups.draw_fresh(connection, request, may_be_fresh), request.run)

    def counts(self, run: str) -> TicketCounts:
        """Where every training episode is, at one moment."""
        return self._database.read(lambda connection: planned_batches.count_tickets(connection, run))

    def uses(self, run: str) -> tuple[int, int]:
        """Rows that updates have learned from, each as often as it was in a batch; and how many were collected."""
        return self._database.read(lambda connection: planned_batches.count_uses(connection, run))

    def last_number(self, run: str) -> int | None:
        """Of the groups ever issued; None: none was."""
        return self._database.read(lambda connection: leases.last_number(connection, run))
