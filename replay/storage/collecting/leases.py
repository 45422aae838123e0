"""Tickets and their leases: who collects which episode, until when by the database's clock, and how it ends.

Claims and heartbeats write only tickets, and never wait for a writer of trajectories: a server locks their rows one by
one, in the order of their place. A ticket ends in the transaction that stores its row, and the first worker counts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from replay.records import ELIGIBLE, OPEN_GROUP, GroupRecord, TaskRecord, group_statistics
from replay.storage.collecting.ticket_records import (
    DONE,
    FAILED,
    LEASED,
    MOST_TRIES,
    QUEUED,
    TRAIN,
    UNENDED,
    Claim,
    Place,
    TicketRecord,
)
from replay.storage.format.rows import Row, chunked
from replay.storage.format.schema import groups, tickets, trajectories
from replay.storage.read import task_records
from replay.storage.statements import insert, seconds_now
from replay.storage.validate import checked, refused
from replay.storage.write import Prepared, append, prepare

_tickets = tickets.c
PLACE = (_tickets.number, _tickets.member)
UNHELD = {"holder": None, "due": None}


def issue(connection: sa.Connection, given: Sequence[TaskRecord], records: Sequence[TicketRecord]) -> int:
    """Store new tickets and return their number. A ticket that was issued before must be the same again."""
    append(connection, prepare(given, [], [], {}, compress_text=False))
    rows = checked(records, "ticket", "number")
    known: dict[tuple[Any, ...], Row] = {}
    for chunk in chunked(sorted({row["number"] for row in rows})):
        here = tickets.select().where(_tickets.run.in_({row["run"] for row in rows}), _tickets.number.in_(chunk))
        known |= {(row["run"], *_place(dict(row))): dict(row) for row in connection.execute(here).mappings()}
    new = [row for row in rows if (row["run"], *_place(row)) not in known]
    for row in rows:
        stored = known.get((row["run"], *_place(row)), row)
        for name in ("task", "iteration", "purpose"):
            if stored[name] != row[name]:
                place = f"ticket {row['number']}/{row['member']}"
                raise refused(name, f"be the issued {stored[name]!r}", row[name], place)
    if new:
        issued_at = connection.scalar(sa.select(seconds_now()))
        insert(connection, tickets, [{**row, "state": QUEUED, "issued_at": issued_at} for row in new])
    return len(new)


def claim(connection: sa.Connection, run: str, holder: str, *, count: int, lease_s: float) -> list[Claim]:
    """Claim up to `count` free tickets; the list is empty only if none is free.

    A ticket that was claimed too often fails instead. A ticket in its last try is claimed alone: if it kills its worker
    again, no other ticket loses a try.
    """
    columns = [_tickets[name] for name in ("number", "member", "task", "iteration", "purpose", "fence", "tries")]
    free = free_tickets(run, *columns, lease_s=lease_s).limit(count).with_for_update(skip_locked=True)
    found = [dict(row) for row in connection.execute(free).mappings()]
    exhausted = [row for row in found if row["tries"] >= MOST_TRIES]
    last = [row for row in found if row["tries"] == MOST_TRIES - 1]
    given = [row for row in found if row["tries"] < MOST_TRIES - 1] or last[:1]
    reason = f"{MOST_TRIES} workers claimed it, and none of them answered"
    change(connection, run, map(_place, exhausted), state=FAILED, reason=reason, ended_at=seconds_now(), **UNHELD)
    if exhausted and not given:
        return claim(connection, run, holder, count=count, lease_s=lease_s)
    taken = {"fence": _tickets.fence + 1, "tries": _tickets.tries + 1, "due": seconds_now() + lease_s}
    change(connection, run, map(_place, given), state=LEASED, holder=holder, **taken)
    known = task_records(connection, sorted({row["task"] for row in given}))
    claims = []
    for row in given:
        ticket = TicketRecord(run, *_place(row), row["task"], row["iteration"], row["purpose"])
        claims.append(Claim(ticket, known[row["task"]], holder, row["fence"] + 1, row["tries"] + 1))
    return claims


def free_tickets(run: str, *columns: sa.Column[Any], lease_s: float) -> sa.Select[Any]:
    """Tickets that nobody holds, or whose lease is over: evaluations first, then the oldest. This is the order of the
    index of unclosed tickets; in another order SQLite reads every ticket there ever was."""
    is_over = (_tickets.state == LEASED) & ~lasts(_tickets.due, lease_s)
    is_free = sa.and_(_tickets.run == run, _tickets.closed_at.is_(None), (_tickets.state == QUEUED) | is_over)
    # `eval` comes before `train` in the alphabet.
    return sa.select(*columns).where(is_free).order_by(_tickets.purpose, *PLACE)


def lasts(due: sa.ColumnElement[float], lease_s: float) -> sa.ColumnElement[bool]:
    """Whether a lease that ends at `due` is still running. One that ends more than two leases from now began before the
    clock was put back, and its holder may be gone: it counts as over."""
    # A subquery reads the clock once, not once per ticket.
    now = sa.select(seconds_now()).scalar_subquery()
    return due.between(now, now + 2 * lease_s)


def _place(row: Row) -> Place:
    return row["number"], row["member"]


def change_held(connection: sa.Connection, claims: Sequence[Claim], **values: Any) -> dict[Place, str]:
    """Set columns of the tickets that the claims still hold, and return the states of the other tickets, by place."""
    mine = {claim.place: claim for claim in claims}
    found = locked(connection, claims)
    held = [
        place
        for place, row in found.items()
        if row["state"] == LEASED and (row["holder"], row["fence"]) == (mine[place].holder, mine[place].fence)
    ]
    if held:
        change(connection, claims[0].ticket.run, held, **values)
    return {place: row["state"] for place, row in found.items() if place not in held}


def locked(connection: sa.Connection, claims: Sequence[Claim]) -> dict[Place, Row]:
    """Read the tickets of claims for one run, and lock unended ones until the transaction ends. Ended tickets never
    change their state, so they are not locked, and the learner need not wait for workers."""
    runs = {claim.ticket.run for claim in claims}
    if len(runs) > 1:
        raise ValueError(f"claims must be for one run, got {sorted(runs)}. Call once for each.")
    found: dict[Place, Row] = {}
    for chunk in chunked(sorted(claim.place for claim in claims)):
        here = tickets.select().where(_tickets.run.in_(runs), sa.tuple_(*PLACE).in_(chunk)).order_by(*PLACE)
        unended = here.where(_tickets.state.in_(UNENDED)).with_for_update()
        for query in (unended, here):
            for row in connection.execute(query).mappings():
                found.setdefault((row["number"], row["member"]), dict(row))
    return found


def change(connection: sa.Connection, run: str, places: Any, **values: Any) -> None:
    for chunk in chunked(list(places)):
        here = (_tickets.run == run) & sa.tuple_(*PLACE).in_(chunk)
        connection.execute(tickets.update().where(here).values(values))


def finish(connection: sa.Connection, claims: Sequence[Claim], prepared: Prepared, ids: Sequence[str]) -> list[bool]:
    """Store the trajectory of each claim, by its id in `prepared`, and return whether it counts. It does not count, and
    is not stored, if another worker was first or the ticket was revoked."""
    for claim, id in zip(claims, ids, strict=True):
        _check_agreed(claim, prepared.trajectories[id].record)
    found = locked(connection, claims)
    counted = [is_first(found.get(claim.place), claim, id) for claim, id in zip(claims, ids, strict=True)]
    new = {
        id: claim
        for claim, id, counts in zip(claims, ids, counted, strict=True)
        if counts and found[claim.place]["state"] != DONE
    }
    if new:
        rows = {id: prepared.trajectories[id] for id in new}
        # No draw may take a row before its group is closed.
        for id, row in rows.items():
            if row.record["state"] == ELIGIBLE:
                rows[id] = replace(row, record={**row.record, "state": OPEN_GROUP})
        _count_members(connection, [row.record for row in rows.values()])
        append(connection, replace(prepared, trajectories=rows))
    for id, claim in new.items():
        end(connection, claim, trajectory=id)
    return counted


def is_first(row: Row | None, claim: Claim, id: str | None) -> bool:
    """Whether this claim ends the ticket first, even after its lease, or repeats an answer that was lost."""
    if row is None:
        raise refused("ticket", "be an issued one", claim.place, f"run {claim.ticket.run}")
    if row["state"] == DONE:
        return (row["holder"], row["fence"], row["trajectory"]) == (claim.holder, claim.fence, id)
    return row["state"] in UNENDED


def _check_agreed(claim: Claim, record: Row) -> None:
    ticket = claim.ticket
    if ticket.purpose != TRAIN:
        raise refused("purpose", "be 'train' for a row that is stored", ticket.purpose, f"ticket {claim.place}")
    for name in ("run", "task", "iteration", "member"):
        if record[name] != getattr(ticket, name):
            rule = f"be that of its ticket ({getattr(ticket, name)!r})"
            raise refused(name, rule, record[name], f"trajectory {record['id']}")


def _count_members(connection: sa.Connection, records: Iterable[Row]) -> None:
    """Update or create the records of the groups of these rows, with statistics of the members so far."""
    new: dict[str, list[Row]] = {}
    for record in records:
        new.setdefault(record["group"], []).append(record)
    for id, members in new.items():
        query = sa.select(trajectories.c.reward, trajectories.c.success).where(trajectories.c.group == id)
        outcomes = [(row.reward, row.success) for row in connection.execute(query)]
        outcomes += [(each["reward"], each["success"]) for each in members]
        first, statistics = members[0], group_statistics(outcomes)
        made = GroupRecord(id, first["run"], first["task"], first["iteration"], **statistics)
        (row,) = checked([made], "group", "id")
        if not connection.execute(groups.update().where(groups.c.id == id).values(statistics)).rowcount:
            insert(connection, groups, [row])


def end(connection: sa.Connection, claim: Claim, **values: Any) -> None:
    ended = {"state": DONE, "holder": claim.holder, "fence": claim.fence, "due": None, "ended_at": seconds_now()}
    change(connection, claim.ticket.run, [claim.place], **ended, **values)
