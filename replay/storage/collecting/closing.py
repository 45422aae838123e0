"""A group whose members have all ended is closed by the learner: then it waits to be fresh once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from replay.errors import ReplayError
from replay.records import ELIGIBLE, OPEN_GROUP, WAITING, GroupRecord, group_statistics
from replay.storage.collecting.finish import member_outcomes, store_group
from replay.storage.counters import set_state
from replay.storage.format.rows import CHECKED_COLUMNS, GROUP_COLUMNS, Row, record_checksum
from replay.storage.format.schema import groups, tickets, trajectories
from replay.storage.statements import rows_by_key
from replay.storage.validate import refused
from replay.ticket_records import UNENDED, EndedGroup, EndedMember, MemberScores, Purpose

_tickets, _rows = tickets.c, trajectories.c
_COLUMNS = (*CHECKED_COLUMNS, _rows.record_checksum)
_ID, _STATE, _GROUP = (CHECKED_COLUMNS.index(_rows[name]) for name in ("id", "state", "group"))
_REWARD, _ADVANTAGE = (CHECKED_COLUMNS.index(_rows[name]) for name in ("reward", "advantage"))


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
    connection: sa.Connection,
    run: str,
    number: int,
    scores: Mapping[str, MemberScores],
    *,
    policy_version: int,
    wanted: bool = True,
) -> tuple[int, ...]:
    """The members that have not ended: with any of these nothing changes. Closed again, it counts as done.

    `scores` are those of its open rows, by id. `wanted`: its rows are to be fresh once; others are for replay at once.
    """
    here = (_tickets.run == run) & (_tickets.number == number)
    listed = list(connection.execute(tickets.select().where(here).order_by(_tickets.member)).mappings())
    if not listed:
        raise ReplayError(f"group must be one that was issued, got number {number} of run {run!r}. Issue it first.")
    missing = tuple(row["member"] for row in listed if row["state"] in UNENDED)
    if missing or listed[0]["closed_at"] is not None:
        return missing
    ids = [row["trajectory"] for row in listed if row["trajectory"] is not None]
    stored = rows_by_key(connection, _COLUMNS, ids, key=_rows.id) if ids else ()
    members = [row for row in stored if row[_STATE] == OPEN_GROUP]
    _check_scores(number, scores, {row[_ID] for row in members})
    for row in members:
        _score(connection, row, scores[row[_ID]])
    if members:
        _summarise(connection, members[0][_GROUP])
    set_state(connection, [row[_ID] for row in members], WAITING if wanted else ELIGIBLE)
    connection.execute(tickets.update().where(here).values(closed_at=policy_version))
    return ()


def _check_scores(number: int, scores: Mapping[str, MemberScores], ids: set[str]) -> None:
    if scores.keys() != ids:
        raise refused("scores", f"be those of the open rows {sorted(ids)}", sorted(scores), f"group number {number}")


def _score(connection: sa.Connection, row: tuple[Any, ...], given: MemberScores) -> None:
    """A row that is not what was written keeps its old checksum, by which whoever reads it finds that out."""
    *values, checksum = row
    was_right = record_checksum(values) == checksum
    values[_REWARD], values[_ADVANTAGE] = float(given.reward), float(given.advantage)
    changed: Row = {"reward": values[_REWARD], "advantage": values[_ADVANTAGE]}
    if was_right:
        changed["record_checksum"] = record_checksum(values)
    connection.execute(trajectories.update().where(_rows.id == row[_ID]).values(changed))


def _summarise(connection: sa.Connection, group: str) -> None:
    row = connection.execute(sa.select(*GROUP_COLUMNS).where(groups.c.id == group)).mappings().one()
    statistics = group_statistics(member_outcomes(connection, group))
    store_group(connection, replace(GroupRecord(**row), **statistics))
