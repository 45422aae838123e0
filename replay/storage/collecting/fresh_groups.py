"""Groups that workers collected. The learner closes a group when all its members have ended. An update then uses it
once as fresh, if its staleness is within the bound; otherwise it is only for replay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from replay.records import COMMITTED, ELIGIBLE, FRESH, OPEN_GROUP, RESERVED, WAITING, BatchRow, DrawRecord, Trajectory
from replay.storage.collecting.ticket_records import DONE, UNENDED
from replay.storage.counters import is_live, set_state
from replay.storage.draw_records import reserve, version_after
from replay.storage.format.rows import CHECKED_COLUMNS, Row, chunked, record_checksum
from replay.storage.format.schema import draws, tickets, trajectories
from replay.storage.read import load, quarantine
from replay.storage.staleness import may_be_fresh
from replay.storage.statements import rows_by_key
from replay.storage.validate import refused

_tickets, _rows = tickets.c, trajectories.c
_COLUMNS = (*CHECKED_COLUMNS, _rows.record_checksum)
_ID, _ADVANTAGE, _AGENTS = (CHECKED_COLUMNS.index(_rows[name]) for name in ("id", "advantage", "agent_rewards"))
Advantages = Mapping[str, tuple[float, str | None]]
"""The advantage and the new `agent_rewards` of rows, by id."""


def open_rows(connection: sa.Connection, run: str, numbers: Sequence[int]) -> list[Trajectory]:
    """The open rows of these groups, in the order of their issue. Damaged rows are quarantined."""
    ids = _open_ids(connection, run, numbers)
    loaded = load(connection, ids)
    quarantine(connection, loaded.corrupt)
    return [loaded.whole[id] for id in ids if id in loaded.whole]


def _open_ids(connection: sa.Connection, run: str, numbers: Sequence[int]) -> list[str]:
    query = sa.select(_rows.id).join_from(trajectories, tickets, _tickets.trajectory == _rows.id)
    query = query.where(_tickets.run == run, _tickets.number.in_(numbers), _rows.state == OPEN_GROUP)
    return list(connection.scalars(query.order_by(_tickets.number, _tickets.member)))


def close_groups(
    connection: sa.Connection, run: str, numbers: Sequence[int], advantages: Advantages, *, policy_version: int
) -> None:
    """Give the open rows of these groups their advantages: they then wait to be fresh. Repeated, it changes nothing.

    Raises InvalidRecord, and changes nothing, if a member has not ended or if `advantages` are of other rows.
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
        _give_advantage(connection, row, *advantages[row[_ID]])
    set_state(connection, ids, WAITING)
    connection.execute(tickets.update().where(here).values(closed_at=policy_version))


def _give_advantage(connection: sa.Connection, row: tuple[Any, ...], advantage: float, agents: str | None) -> None:
    """Store the advantage of a row. A damaged row keeps its old checksum, so that reading it finds the damage."""
    *values, checksum = row
    was_right = record_checksum(values) == checksum
    values[_ADVANTAGE], values[_AGENTS] = float(advantage), agents
    changed: Row = {"advantage": float(advantage), "agent_rewards": agents}
    if was_right:
        changed["record_checksum"] = record_checksum(values)
    connection.execute(trajectories.update().where(_rows.id == row[_ID]).values(changed))


@dataclass(frozen=True)
class FreshRequest:
    run: str
    iteration: int
    planned_for: int
    """The iteration that the batch was planned for: this one, or an earlier one if collecting took longer."""
    policy_version: int
    max_staleness: int
    """Most publishes between a row's oldest token and this update, counting weights that a resume took back."""


@dataclass(frozen=True)
class FreshDraw:
    rows: list[BatchRow] = field(default_factory=list)
    late: int = 0
    """The number of rows that this draw found to be too late."""


def draw_fresh(connection: sa.Connection, request: FreshRequest) -> FreshDraw:
    """Reserve the groups whose staleness is within the bound. The other groups become eligible for replay."""
    mine = (draws.c.run == request.run) & (draws.c.iteration == request.iteration)
    connection.execute(draws.delete().where(mine, draws.c.state == RESERVED, draws.c.stream == FRESH))
    waiting = [list(rows) for _, rows in groupby(_waiting(connection, request), key=lambda row: int(row.number))]
    late: list[list[Any]] = []
    within: list[list[Any]] = []
    for rows in waiting:
        staleness = [request.policy_version - row.policy_version_min for row in rows]
        (within if may_be_fresh(staleness, request.max_staleness) else late).append(rows)
    missed = [row.id for rows in late for row in rows]
    set_state(connection, missed, ELIGIBLE)
    for chunk in chunked(missed):
        too_late = tickets.update().where(_tickets.trajectory.in_(chunk))
        connection.execute(too_late.values(late_at=request.policy_version))
    ids = [row.id for rows in within for row in rows]
    loaded = load(connection, ids)
    quarantine(connection, loaded.corrupt)
    rows = [loaded.whole[id] for id in ids if id in loaded.whole]
    ages = [abs(request.policy_version - row.record.policy_version_min) for row in rows]
    records = [
        DrawRecord(request.run, request.iteration, slot, row.id, FRESH, probability=None, staleness=age)
        for slot, (row, age) in enumerate(zip(rows, ages, strict=True))
    ]
    reserve(connection, records)
    return FreshDraw([*map(BatchRow.drawn, rows, records)], late=len(missed))


def _waiting(connection: sa.Connection, request: FreshRequest) -> list[Any]:
    """The waiting rows of closed groups that no other iteration has reserved, in the order of their issue."""
    elsewhere = sa.exists().where(draws.c.trajectory == _rows.id, is_live())
    query = (
        sa.select(_tickets.number, _rows.id, _rows.policy_version_min)
        .join_from(trajectories, tickets, _tickets.trajectory == _rows.id)
        .where(_rows.run == request.run, _tickets.iteration == request.planned_for, _rows.state == WAITING, ~elsewhere)
    )
    return list(connection.execute(query.order_by(_tickets.number, _tickets.member)))


def make_fresh_again(connection: sa.Connection, run: str, iteration: int) -> int:
    """Let rows that were fresh or late after `iteration` wait to be fresh again, and return their number.

    A resume calls it before it rolls draws back.
    """
    of_run = (draws.c.run == run) & (draws.c.state == COMMITTED) & (draws.c.stream == FRESH)
    since = sa.exists().where(draws.c.trajectory == _rows.id, of_run, draws.c.iteration > iteration)
    late = _tickets.late_at > version_after(connection, run, iteration)
    query = sa.select(_rows.id).join_from(tickets, trajectories, _rows.id == _tickets.trajectory)
    query = query.where(_tickets.run == run, _tickets.state == DONE, _rows.state == ELIGIBLE, since | late)
    ids = list(connection.scalars(query.order_by(_rows.iteration, _rows.slot, _rows.id)))
    set_state(connection, ids, WAITING)
    connection.execute(tickets.update().where(_tickets.run == run, late).values(late_at=None))
    return len(ids)
