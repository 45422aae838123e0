"""Groups whose members have all ended are closed by the learner: then they wait to be fresh once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from replay.records import OPEN_GROUP, WAITING, Trajectory
from replay.storage.counters import set_state
from replay.storage.format.rows import CHECKED_COLUMNS, Row, record_checksum
from replay.storage.format.schema import tickets, trajectories
from replay.storage.read import load, quarantine
from replay.storage.statements import rows_by_key
from replay.storage.validate import refused
from replay.ticket_records import UNENDED, EndedGroup, EndedMember, Purpose

_tickets, _rows = tickets.c, trajectories.c
_COLUMNS = (*CHECKED_COLUMNS, _rows.record_checksum)
_ID, _ADVANTAGE = (CHECKED_COLUMNS.index(_rows[name]) for name in ("id", "advantage"))


def ended_groups(connection: sa.Connection, run: str, purpose: Purpose) -> list[EndedGroup]:
    """Those that have no member under way and are not closed, in the order of their issue."""
    unclosed = (_tickets.run == run) & (_tickets.purpose == purpose) & _tickets.closed_at.is_(None)
    under_way = sa.select(_tickets.number).where(unclosed, _tickets.state.in_(UNENDED))
    query = tickets.select().where(unclosed, _tickets.number.not_in(under_way))
    found = connection.execute(query.order_by(_tickets.number, _tickets.member)).mappings()
    return [_ended(number, list(rows)) for number, rows in groupby(found, key=lambda row: int(row["number"]))]


def _ended(number: int, rows: list[Any]) -> EndedGroup:
    members = tuple(
        EndedMember(
            row["member"],
            row["state"],
            row["trajectory"],
            row["reason"],
            None if row["outcome"] is None else json.loads(row["outcome"]),
        )
        for row in rows
    )
    return EndedGroup(number, rows[0]["iteration"], members)


def open_rows(connection: sa.Connection, run: str, numbers: Sequence[int]) -> list[Trajectory]:
    """The rows of these groups that are to be fresh, in the order of their issue; damaged ones are set aside."""
    ids = _open_ids(connection, run, numbers)
    loaded = load(connection, ids)
    quarantine(connection, loaded.corrupt)
    return [loaded.whole[id] for id in ids if id in loaded.whole]


def _open_ids(connection: sa.Connection, run: str, numbers: Sequence[int]) -> list[str]:
    query = sa.select(_rows.id).join_from(trajectories, tickets, _tickets.trajectory == _rows.id)
    query = query.where(_tickets.run == run, _tickets.number.in_(numbers), _rows.state == OPEN_GROUP)
    return list(connection.scalars(query.order_by(_tickets.number, _tickets.member)))


def close_groups(
    connection: sa.Connection,
    run: str,
    numbers: Sequence[int],
    advantages: Mapping[str, float],
    *,
    policy_version: int,
) -> None:
    """Their open rows get their `advantages`, by id, and wait to be fresh once. Closed again, they count as done.

    Raises InvalidRecord, and changes nothing, where a member has not ended or the advantages are of other rows.
    """
    here = (_tickets.run == run) & _tickets.number.in_(numbers)
    listed = connection.execute(sa.select(_tickets.number, _tickets.state, _tickets.closed_at).where(here)).all()
    ended = set(numbers) & {row.number for row in listed} - {row.number for row in listed if row.state in UNENDED}
    if ended != set(numbers):
        rule = "be issued ones whose members have all ended"
        raise refused("groups", rule, sorted(set(numbers) - ended), f"run {run}")
    if all(row.closed_at is not None for row in listed):
        return
    ids = _open_ids(connection, run, numbers)
    if advantages.keys() != set(ids):
        raise refused("advantages", f"be those of the open rows {ids}", sorted(advantages), f"groups {list(numbers)}")
    for row in rows_by_key(connection, _COLUMNS, ids, key=_rows.id) if ids else ():
        _give_advantage(connection, row, float(advantages[row[_ID]]))
    set_state(connection, ids, WAITING)
    connection.execute(tickets.update().where(here).values(closed_at=policy_version))


def _give_advantage(connection: sa.Connection, row: tuple[Any, ...], advantage: float) -> None:
    """A row that is not what was written keeps its old checksum, by which whoever reads it finds that out."""
    *values, checksum = row
    was_right = record_checksum(values) == checksum
    values[_ADVANTAGE] = advantage
    changed: Row = {"advantage": advantage}
    if was_right:
        changed["record_checksum"] = record_checksum(values)
    connection.execute(trajectories.update().where(_rows.id == row[_ID]).values(changed))
