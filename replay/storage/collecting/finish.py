"""The end of an episode: its ticket ends in the transaction that stores its row, and whoever is first counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from context.messages import canonical_json
from replay.records import ELIGIBLE, OPEN_GROUP, GroupRecord, HeldOutEpisode, group_statistics
from replay.storage.collecting import held_out_rows
from replay.storage.collecting.leases import change, locked
from replay.storage.format.rows import Row
from replay.storage.format.schema import groups, trajectories
from replay.storage.statements import insert, seconds_now
from replay.storage.validate import checked, refused
from replay.storage.write import Prepared, PreparedRow, append
from replay.ticket_records import DONE, EVALUATION, TRAIN, UNENDED, Claim

_AGREED = ("run", "task", "iteration", "member")


def finish(connection: sa.Connection, claims: Sequence[Claim], prepared: Prepared, ids: Sequence[str]) -> list[bool]:
    """Whether each claim's trajectory counts: another one's may have been first, or the ticket revoked.

    `ids` are those of the claims' trajectories among `prepared`. Where one does not count nothing of it is stored.
    """
    for claim, id in zip(claims, ids, strict=True):
        _check_agreed(claim, prepared.trajectories[id].record)
    found = locked(connection, claims)
    counted = [_is_first(found.get(claim.place), claim, id) for claim, id in zip(claims, ids, strict=True)]
    new = {
        id: claim
        for claim, id, counts in zip(claims, ids, counted, strict=True)
        if counts and found[claim.place]["state"] != DONE
    }
    if new:
        rows = {id: _in_open_group(prepared.trajectories[id]) for id in new}
        _count_members(connection, [row.record for row in rows.values()])
        append(connection, replace(prepared, trajectories=rows))
    for id, claim in new.items():
        _end(connection, claim, trajectory=id)
    return counted


def finish_evaluation(
    connection: sa.Connection,
    claim: Claim,
    outcome: Mapping[str, Any],
    episode: HeldOutEpisode | None = None,
    *,
    compressed: bool = False,
) -> bool:
    """Whether it counts. Of an evaluation no row is stored that could be drawn: `outcome` is what the learner wants to
    know of it, and the `episode` is kept apart."""
    if claim.ticket.purpose != EVALUATION:
        raise refused("outcome", "be of an evaluation", claim.ticket.purpose, f"ticket {claim.place}")
    found = locked(connection, [claim]).get(claim.place)
    if not _is_first(found, claim, None):
        return False
    if found is not None and found["state"] != DONE:
        _end(connection, claim, outcome=canonical_json(outcome))
        if episode is not None:
            held_out_rows.put(connection, [episode], compressed=compressed)
    return True


def _is_first(row: Row | None, claim: Claim, id: str | None) -> bool:
    """Also where it was stored before, and the answer was lost on its way.

    A claim whose lease is over counts if no other has ended the ticket: its work is as good.
    """
    if row is None:
        raise refused("ticket", "be an issued one", claim.place, f"run {claim.ticket.run}")
    if row["state"] == DONE:
        return (row["holder"], row["fence"], row["trajectory"]) == (claim.holder, claim.fence, id)
    return row["state"] in UNENDED


def _check_agreed(claim: Claim, record: Row) -> None:
    ticket = claim.ticket
    if ticket.purpose != TRAIN:
        raise refused("purpose", "be 'train' for a row that is stored", ticket.purpose, f"ticket {claim.place}")
    for name in _AGREED:
        if record[name] != getattr(ticket, name):
            rule = f"be that of its ticket ({getattr(ticket, name)!r})"
            raise refused(name, rule, record[name], f"trajectory {record['id']}")


def _in_open_group(row: PreparedRow) -> PreparedRow:
    """A row that could be drawn is not yet."""
    if row.record["state"] != ELIGIBLE:
        return row
    return replace(row, record={**row.record, "state": OPEN_GROUP})


def _count_members(connection: sa.Connection, records: Iterable[Row]) -> None:
    """The records of their groups are of the members so far."""
    new: dict[str, list[Row]] = {}
    for record in records:
        new.setdefault(record["group"], []).append(record)
    for id, members in new.items():
        query = sa.select(trajectories.c.reward, trajectories.c.success).where(trajectories.c.group == id)
        outcomes = [(row.reward, row.success) for row in connection.execute(query)]
        outcomes += [(each["reward"], each["success"]) for each in members]
        first = members[0]
        statistics = group_statistics(outcomes)
        _store_group(connection, GroupRecord(id, first["run"], first["task"], first["iteration"], **statistics))


def _store_group(connection: sa.Connection, record: GroupRecord) -> None:
    """In place of what was known of the group before."""
    (row,) = checked([record], "group", "id")
    here = groups.c.id == record.id
    place = {name: row.pop(name) for name in ("id", "run", "task", "iteration")}
    known = connection.execute(sa.select(*(groups.c[name] for name in place)).where(here)).mappings().one_or_none()
    if known is None:
        insert(connection, groups, [{**place, **row}])
        return
    for name, value in place.items():
        if known[name] != value:
            raise refused(name, f"be the stored {known[name]!r} of the same id", value, f"group {record.id}")
    connection.execute(groups.update().where(here).values(row))


def _end(connection: sa.Connection, claim: Claim, **values: Any) -> None:
    ended = {"state": DONE, "holder": claim.holder, "fence": claim.fence, "due": None, "ended_at": seconds_now()}
    change(connection, claim.ticket.run, [claim.place], **ended, **values)
