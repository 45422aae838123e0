"""The episodes that workers collect for a run, as a part of the store. The learner issues them, closes groups and draws
fresh ones, checked against a resume by others; workers claim, extend and finish, checked against their claim."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import sqlalchemy as sa

from context.messages import canonical_json
from replay.records import (
    COMMITTED,
    FORGOTTEN,
    FRESH,
    OPEN_GROUP,
    WAITING,
    HeldOutEpisode,
    RunRecord,
    TaskRecord,
    Trajectory,
)
from replay.storage import write
from replay.storage.collecting import fresh_groups, leases
from replay.storage.collecting.fresh_groups import FreshDraw, FreshRequest
from replay.storage.collecting.ticket_records import (
    DONE,
    FAILED,
    QUEUED,
    TICKET_STATES,
    TRAIN,
    UNENDED,
    Claim,
    EndedGroup,
    Place,
    PlannedBatch,
    Purpose,
    TicketCounts,
    TicketRecord,
)
from replay.storage.databases import Database, Result
from replay.storage.format.schema import draws, iterations, planned_batches, reclaimed, tickets, trajectories
from replay.storage.statements import insert, seconds_now
from replay.storage.validate import checked

Lost = dict[Place, str]
"""States of tickets that a claim holds no more, by number and member: `revoked`, or ended or claimed by another."""
_planned, _tickets, _rows = planned_batches.c, tickets.c, trajectories.c


class _Write(Protocol):
    def __call__(self, work: Callable[[sa.Connection], Result], *runs: str) -> Result: ...


class Tickets:
    """Every method is one transaction: done when it returns, not begun when it raises. All may be done again."""

    def __init__(self, database: Database, write: _Write, run_of: Callable[[str], RunRecord]) -> None:
        """`write` does work in one transaction, and checks that nobody else has resumed the runs given after it."""
        self._database = database
        self._write_rows = database.write_rows
        self._write = write
        self._run_of = run_of

    def issue(
        self, tasks: Sequence[TaskRecord], tickets: Sequence[TicketRecord], batch: PlannedBatch | None = None
    ) -> int:
        """How many are new. A group is issued whole, its number above all before; a `batch` stays as first issued."""
        runs = {ticket.run for ticket in tickets} | ({batch.run} if batch else set())

        def work(connection: sa.Connection) -> int:
            if batch is not None:
                _remember(connection, batch)
            return leases.issue(connection, tasks, tickets)

        return self._write(work, *runs)

    def planned(self, run: str, *, after: int) -> list[PlannedBatch]:
        """The batches that were issued for iterations after this one, in order."""
        query = planned_batches.select().where(_planned.run == run, _planned.iteration > after)
        found = self._database.read(lambda connection: connection.execute(query.order_by(_planned.iteration)).all())
        return [PlannedBatch(row.run, row.iteration, json.loads(row.plan)) for row in found]

    def planned_batch(self, run: str, iteration: int) -> PlannedBatch | None:
        """The one that was issued for an iteration; None: none was."""
        found = self.planned(run, after=iteration - 1)
        return found[0] if found and found[0].iteration == iteration else None

    def episodes(self, run: str, iteration: int, purpose: Purpose = TRAIN) -> int:
        """How many were issued for an iteration."""
        return self._count(_tickets.run == run, _tickets.iteration == iteration, _tickets.purpose == purpose)

    def under_way(self, run: str, iteration: int, purpose: Purpose = TRAIN) -> int:
        """How many of them have not ended: asked again and again, of the index of unclosed tickets."""
        unclosed = (_tickets.run == run) & (_tickets.purpose == purpose) & _tickets.closed_at.is_(None)
        return self._count(unclosed, _tickets.state.in_(UNENDED), _tickets.iteration == iteration)

    def ends(self, run: str, iteration: int) -> set[str]:
        """States of the rows of the batch that was issued for an iteration, and of tickets that have none; of rows that
        are gone, `forgotten`: no others go before they were fresh."""
        mine = (_tickets.run == run) & (_tickets.iteration == iteration) & (_tickets.purpose == TRAIN)
        gone = sa.exists().where(reclaimed.c.id == _tickets.trajectory)
        state = sa.func.coalesce(_rows.state, sa.case((gone, FORGOTTEN), else_=_tickets.state))
        states = sa.select(state).outerjoin_from(tickets, trajectories, _rows.id == _tickets.trajectory).where(mine)
        return self._database.read(lambda connection: set(connection.scalars(states)))

    def claim(self, run: str, holder: str, *, count: int, lease_s: float) -> list[Claim]:
        """Up to `count` episodes to collect, evaluations first, then the oldest, each for `lease_s` seconds."""
        return self._write_rows(lambda asked: leases.claim(asked, run, holder, count=count, lease_s=lease_s))

    def extend(self, claims: Sequence[Claim], *, lease_s: float) -> Lost:
        """A heartbeat: the leases begin again, but for tickets that are lost: nobody need go on with them."""
        return self._change_held(claims, due=seconds_now() + lease_s)

    def give_back(self, claims: Sequence[Claim]) -> Lost:
        """A worker that stops in order: others may claim them at once, and no try is counted."""
        return self._change_held(claims, state=QUEUED, tries=_tickets.tries - 1, **leases.UNHELD)

    def fail(self, claims: Sequence[Claim], reason: str) -> Lost:
        """They end without a row, and their groups are smaller by them."""
        return self._change_held(claims, state=FAILED, reason=reason, due=None, ended_at=seconds_now())

    def finish(self, finished: Sequence[tuple[Claim, Trajectory]]) -> list[bool]:
        """Store what was collected for the run, task, iteration and member of each ticket; whether each counts, or
        another was first: then it is not stored."""
        if not finished:
            return []
        claims, rows = [claim for claim, _ in finished], [row for _, row in finished]
        runs = {id: self._run_of(id) for id in {row.record.run for row in rows}}
        prepared = write.prepare([], [], rows, runs, compress_text=self._database.compresses_text)
        ids = [row.id for row in rows]
        # Who resumes the run does not end its workers: only the tickets decide.
        return self._write(lambda connection: leases.finish(connection, claims, prepared, ids))

    def finish_evaluation(
        self, claim: Claim, outcome: Mapping[str, Any], episode: HeldOutEpisode | None = None
    ) -> bool:
        """Whether it counts; `outcome` is for the learner, and the `episode` is kept apart from what is drawn."""
        compressed = self._database.compresses_text
        return self._write_rows(
            lambda connection: leases.finish_evaluation(connection, claim, outcome, episode, compressed=compressed)
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
        self, run: str, numbers: Sequence[int], advantages: fresh_groups.Advantages, *, policy_version: int
    ) -> None:
        """Give the open rows of ended groups their advantages, by id: from now on they wait to be fresh once."""

        def work(connection: sa.Connection) -> None:
            fresh_groups.close_groups(connection, run, numbers, advantages, policy_version=policy_version)

        self._write(work, run)

    def draw_fresh(self, request: FreshRequest) -> FreshDraw:
        """Reserve the rows of a planned batch; groups beyond the bound become eligible for replay, counted as late."""
        return self._write(lambda connection: fresh_groups.draw_fresh(connection, request), request.run)

    def counts(self, run: str) -> TicketCounts:
        """Where every training episode is, at one moment."""
        return self._database.read(lambda connection: count_tickets(connection, run))

    def uses(self, run: str) -> tuple[int, int]:
        """Rows that updates have learned from, each as often as it was in a batch; and how many were collected."""
        sums = sa.select(sa.func.sum(iterations.c.fresh + iterations.c.replay)).where(iterations.c.run == run)
        done = (_tickets.run == run) & (_tickets.purpose == TRAIN) & (_tickets.state == DONE)
        counts = sa.select(sums.scalar_subquery(), sa.select(sa.func.count()).where(done).scalar_subquery())
        learned, collected = self._database.read(lambda connection: connection.execute(counts).one())
        return int(learned or 0), int(collected)

    def last_number(self, run: str) -> int | None:
        """The number of the last group ever issued; None: none was."""
        newest = sa.select(sa.func.max(_tickets.number)).where(_tickets.run == run)
        found: int | None = self._database.read(lambda connection: connection.scalar(newest))
        return found

    def _change_held(self, claims: Sequence[Claim], **values: Any) -> Lost:
        return self._write_rows(lambda connection: leases.change_held(connection, claims, **values))

    def _count(self, *conditions: sa.ColumnElement[bool]) -> int:
        query = sa.select(sa.func.count()).select_from(tickets).where(*conditions)
        return self._database.read(lambda connection: connection.scalar(query)) or 0


def _remember(connection: sa.Connection, batch: PlannedBatch) -> None:
    """The plan of a batch's tickets; the one that was issued first stays."""
    (row,) = checked([batch], "planned batch", "iteration")
    here = (_planned.run == batch.run) & (_planned.iteration == batch.iteration)
    if connection.execute(sa.select(_planned.iteration).where(here)).first() is None:
        insert(connection, planned_batches, [{**row, "plan": canonical_json(batch.plan)}])


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
_UNDONE = tuple(state for state in TICKET_STATES if state != DONE)
_PLACE = sa.case(
    (_tickets.state != DONE, _tickets.state),
    (_IN_A_BATCH, sa.case((_IS_LATE, "both"), else_="fresh")),
    (_IS_LATE, "late"),
    (_HAS_ENDED, "unused"),
    else_="undecided",
)


def count_tickets(connection: sa.Connection, run: str) -> TicketCounts:
    """All of one moment where the connection has one consistent view."""
    # With an offset the database looks for a ticket's row and draws once, not again for every use of the column.
    places = sa.select(_PLACE.label("place")).where(_tickets.run == run, _tickets.purpose == TRAIN).offset(0).subquery()
    query = sa.select(places.c.place, sa.func.count()).group_by(places.c.place)
    found = {place: int(count) for place, count in connection.execute(query)}
    unfinished = (_rows.run == run) & _rows.state.in_([WAITING, OPEN_GROUP])
    rows = sa.select(_rows.state, sa.func.count()).where(unfinished).group_by(_rows.state)
    states = {state: int(count) for state, count in connection.execute(rows)}
    both = found.get("both", 0)
    return TicketCounts(
        **{state: found.get(state, 0) for state in _UNDONE},
        done=sum(count for place, count in found.items() if place not in _UNDONE),
        fresh=found.get("fresh", 0) + both,
        late=found.get("late", 0) + both,
        unused=found.get("unused", 0),
        waiting=states.get(WAITING, 0),
        open=states.get(OPEN_GROUP, 0),
    )
