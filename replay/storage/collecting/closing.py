"""A group whose members have all ended is closed by the learner: then it waits to be fresh once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from replay.records import OPEN_GROUP, WAITING
from replay.storage.counters import set_state
from replay.storage.format.rows import CHECKED_COLUMNS, Row, record_checksum
from replay.storage.format.schema import tickets, trajectories
from replay.storage.statements import rows_by_key
from replay.storage.validate import refused
from replay.ticket_records import UNENDED, EndedGroup, EndedMember, Purpose

_tickets, _rows = tickets.c, trajectories.c
_COLUMNS = (*CHECKED_COLUMNS, _rows.record_checksum)
_ID, _STATE, _ADVANTAGE = (CHECKED_COLUMNS.index(_rows[name]) for name in ("id", "state", "advantage"))


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
    return EndedGroup(number, rows[0]["task"], rows[0]["iteration"], members)


def close_group(
    connection: sa.Connection, run: str, number: int, advantages: Mapping[str, float], *, policy_version: int
) -> None:
    """Its open rows get their `advantages`, by id, and wait to be fresh once. Closed again, it counts as done.

    Raises InvalidRecord, and changes nothing, where a member has not ended or the advantages are of other rows.
    """
    here = (_tickets.run == run) & (_tickets.number == number)
    listed = list(connection.execute(tickets.select().where(here)).mappings())
    if not listed or any(row["state"] in UNENDED for row in listed):
        raise refused("group", "be an issued one whose members have all ended", number, f"run {run}")
    if listed[0]["closed_at"] is not None:
        return
    ids = [row["trajectory"] for row in listed if row["trajectory"] is not None]
    stored = rows_by_key(connection, _COLUMNS, ids, key=_rows.id) if ids else ()
    members = {row[_ID]: row for row in stored if row[_STATE] == OPEN_GROUP}
    if advantages.keys() != members.keys():
        rule = f"be those of the open rows {sorted(members)}"
        raise refused("advantages", rule, sorted(advantages), f"group number {number}")
    for id, row in members.items():
        _give_advantage(connection, row, float(advantages[id]))
    set_state(connection, list(members), WAITING)
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
