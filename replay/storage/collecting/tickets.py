"""The part of the store for episodes that workers collect. The learner issues tickets, closes groups and draws fresh
ones; it is refused if another process resumed the run. Workers claim, extend and finish: only claims are checked."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
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
from replay.storage.collecting import fresh_groups, leases, never_drawn
from replay.storage.collecting.fresh_groups import FreshDraw, FreshRequest
from replay.storage.collecting.ticket_records import (
    DONE,
    EVALUATION,
    FAILED,
    QUEUED,
    REVOKED,
    TICKET_STATES,
    TRAIN,
    UNENDED,
    Claim,
    EndedGroup,
    EndedMember,
    Place,
    PlannedBatch,
    Purpose,
    TicketCounts,
    TicketRecord,
)
from replay.storage.databases import Database, Result
from replay.storage.format.schema import draws, planned_batches, reclaimed, tickets, trajectories
from replay.storage.statements import insert, seconds_now
from replay.storage.validate import checked, refused

Lost = dict[Place, str]
"""The states of tickets that a claim no longer holds, by number and member: revoked, ended, or claimed by another."""
_MEMBER = ("member", "state", "trajectory", "reason")
_planned, _tickets, _rows = planned_batches.c, tickets.c, trajectories.c


class _Write(Protocol):
    def __call__(self, work: Callable[[sa.Connection], Result], *runs: str) -> Result: ...


class Tickets:
    """Tickets of runs. Every method is one transaction: complete when it returns, without effect when it raises. Every
    method may be repeated."""

    def __init__(self, database: Database, write: _Write, run_of: Callable[[str], RunRecord]) -> None:
        """`write` does work in one transaction, and checks that no other process has resumed the given runs."""
        self._database = database
        self._write_rows = database.write_rows
        self._write = write
        self._run_of = run_of

    def issue(
        self, tasks: Sequence[TaskRecord], tickets: Sequence[TicketRecord], batch: PlannedBatch | None = None
    ) -> int:
        """Issue tickets, and return the number of new ones. A group is issued whole, with a number above all earlier
        ones. A `batch` stays as it was first issued."""
        runs = {ticket.run for ticket in tickets} | ({batch.run} if batch else set())

        def work(connection: sa.Connection) -> int:
            if batch is not None:
                _remember(connection, batch)
            return leases.issue(connection, tasks, tickets)

        return self._write(work, *runs)

    def planned(self, run: str, *, after: int) -> list[PlannedBatch]:
        """The batches that were issued for iterations after `after`, in order."""
        query = planned_batches.select().where(_planned.run == run, _planned.iteration > after)
        found = self._database.read(lambda connection: connection.execute(query.order_by(_planned.iteration)).all())
        return [PlannedBatch(row.run, row.iteration, json.loads(row.plan)) for row in found]

    def planned_batch(self, run: str, iteration: int) -> PlannedBatch | None:
        """The batch that was issued for an iteration; None: there is none."""
        found = self.planned(run, after=iteration - 1)
        return found[0] if found and found[0].iteration == iteration else None

    def episodes(self, run: str, iteration: int, purpose: Purpose = TRAIN) -> int:
        """The number of episodes that were issued for an iteration."""
        return self._count(_tickets.run == run, _tickets.iteration == iteration, _tickets.purpose == purpose)

    def under_way(self, run: str, iteration: int, purpose: Purpose = TRAIN) -> int:
        """The number of an iteration's episodes that have not ended. It is polled, so it reads only the index of
        unclosed tickets."""
        unclosed = (_tickets.run == run) & (_tickets.purpose == purpose) & _tickets.closed_at.is_(None)
        return self._count(unclosed, _tickets.state.in_(UNENDED), _tickets.iteration == iteration)

    def ends(self, run: str, iteration: int) -> set[str]:
        """The states of the rows of a batch, and of its tickets without a row. A row that is gone counts as
        `forgotten`, for no other row goes before it was fresh."""
        mine = (_tickets.run == run) & (_tickets.iteration == iteration) & (_tickets.purpose == TRAIN)
        gone = sa.exists().where(reclaimed.c.id == _tickets.trajectory)
        state = sa.func.coalesce(_rows.state, sa.case((gone, FORGOTTEN), else_=_tickets.state))
        states = sa.select(state).outerjoin_from(tickets, trajectories, _rows.id == _tickets.trajectory).where(mine)
        return self._database.read(lambda connection: set(connection.scalars(states)))

    def claim(self, run: str, holder: str, *, count: int, lease_s: float) -> list[Claim]:
        """Claim up to `count` episodes for `lease_s` seconds: evaluations first, then the oldest."""
        return self._write_rows(lambda asked: leases.claim(asked, run, holder, count=count, lease_s=lease_s))

    def extend(self, claims: Sequence[Claim], *, lease_s: float) -> Lost:
        """Renew the leases of these claims. The worker may drop the lost tickets that are returned."""
        return self._change_held(claims, due=seconds_now() + lease_s)

    def give_back(self, claims: Sequence[Claim]) -> Lost:
        """Return the tickets of a worker that shuts down. Other workers may claim them at once; no try is counted."""
        return self._change_held(claims, state=QUEUED, tries=_tickets.tries - 1, **leases.UNHELD)

    def fail(self, claims: Sequence[Claim], reason: str) -> Lost:
        """End the tickets without rows. Their groups become smaller."""
        return self._change_held(claims, state=FAILED, reason=reason, due=None, ended_at=seconds_now())

    def finish(self, finished: Sequence[tuple[Claim, Trajectory]]) -> list[bool]:
        """Store the trajectories of tickets, and return whether each counts. If another worker was first, a trajectory
        is not stored."""
        if not finished:
            return []
        claims, rows = [claim for claim, _ in finished], [row for _, row in finished]
        runs = {id: self._run_of(id) for id in {row.record.run for row in rows}}
        prepared = write.prepare([], [], rows, runs, compress_text=self._database.compresses_text)
        ids = [row.id for row in rows]
        # A resume of the run does not stop its workers, so only the tickets decide.
        return self._write(lambda connection: leases.finish(connection, claims, prepared, ids))

    def finish_evaluation(
        self, claim: Claim, outcome: Mapping[str, Any], episode: HeldOutEpisode | None = None
    ) -> bool:
        """End a ticket of an evaluation, and return whether this end counts. `outcome` is for the learner. No draw
        takes the `episode`."""
        if claim.ticket.purpose != EVALUATION:
            raise refused("outcome", "be of an evaluation", claim.ticket.purpose, f"ticket {claim.place}")

        def work(connection: sa.Connection) -> bool:
            found = leases.locked(connection, [claim]).get(claim.place)
            counts = leases.is_first(found, claim, None)
            if counts and found is not None and found["state"] != DONE:
                leases.end(connection, claim, outcome=canonical_json(outcome))
                if episode is not None:
                    never_drawn.put_episodes(connection, [episode], compressed=self._database.compresses_text)
            return counts

        return self._write_rows(work)

    def revoke(self, run: str, purpose: Purpose, reason: str) -> int:
        """Revoke the unended tickets of a purpose, and return their number. Holders learn it from their next
        heartbeat."""
        unended = (_tickets.run == run) & (_tickets.purpose == purpose) & _tickets.state.in_(UNENDED)
        query = sa.select(*leases.PLACE).where(unended).order_by(*leases.PLACE).with_for_update()

        def work(connection: sa.Connection) -> int:
            places = [(row.number, row.member) for row in connection.execute(query)]
            leases.change(connection, run, places, state=REVOKED, reason=reason, due=None, ended_at=seconds_now())
            return len(places)

        return self._write(work, run)

    def ended_groups(self, run: str, purpose: Purpose = TRAIN) -> list[EndedGroup]:
        """The groups that the learner may close now, oldest first: they are not closed, and no member is under way."""
        unclosed = (_tickets.run == run) & (_tickets.purpose == purpose) & _tickets.closed_at.is_(None)
        under_way = sa.select(_tickets.number).where(unclosed, _tickets.state.in_(UNENDED))
        query = tickets.select().where(unclosed, _tickets.number.not_in(under_way)).order_by(*leases.PLACE)

        def ask(connection: sa.Connection) -> list[EndedGroup]:
            found, ended = connection.execute(query).mappings(), []
            for (number, iteration), rows in groupby(found, key=lambda row: (int(row["number"]), row["iteration"])):
                members = [
                    EndedMember(**{name: row[name] for name in _MEMBER}, outcome=json.loads(row["outcome"] or "null"))
                    for row in rows
                ]
                ended.append(EndedGroup(number, iteration, tuple(members)))
            return ended

        return self._database.read(ask)

    def open_rows(self, run: str, numbers: Sequence[int]) -> list[Trajectory]:
        """The rows whose advantages `close_groups` needs, in the order of issue. Damaged rows are quarantined."""
        return self._write(lambda connection: fresh_groups.open_rows(connection, run, numbers), run)

    def close_groups(
        self, run: str, numbers: Sequence[int], advantages: fresh_groups.Advantages, *, policy_version: int
    ) -> None:
        """Give the open rows of ended groups their advantages, by id. From now on the rows wait to be fresh."""

        def work(connection: sa.Connection) -> None:
            fresh_groups.close_groups(connection, run, numbers, advantages, policy_version=policy_version)

        self._write(work, run)

    def draw_fresh(self, request: FreshRequest) -> FreshDraw:
        """Reserve the rows of a planned batch. Groups beyond the bound count as late, and are for replay."""
        return self._write(lambda connection: fresh_groups.draw_fresh(connection, request), request.run)

    def last_number(self, run: str) -> int | None:
        """The number of the last group that was issued; None: there is none."""
        newest = sa.select(sa.func.max(_tickets.number)).where(_tickets.run == run)
        found: int | None = self._database.read(lambda connection: connection.scalar(newest))
        return found

    def _change_held(self, claims: Sequence[Claim], **values: Any) -> Lost:
        return self._write_rows(lambda connection: leases.change_held(connection, claims, **values))

    def _count(self, *conditions: sa.ColumnElement[bool]) -> int:
        query = sa.select(sa.func.count()).select_from(tickets).where(*conditions)
        return self._database.read(lambda connection: connection.scalar(query)) or 0


def _remember(connection: sa.Connection, batch: PlannedBatch) -> None:
    """Store the plan of a batch; a plan that is stored already stays."""
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
    """The counts of a run's training tickets, at one moment if the connection has one consistent view."""
    # With an offset the database looks up a ticket's row and draws once, not for every use of the column.
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
