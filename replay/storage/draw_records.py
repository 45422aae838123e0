"""Draws: which rows an update used. A draw reserves them, its update commits them, and a resume rolls them back."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa

from replay.records import (
    COMMITTED,
    ELIGIBLE,
    FRESH,
    ORPHANED,
    REPLAY,
    RESERVED,
    UNTRAINABLE,
    WAITING,
    DrawRecord,
    IterationRecord,
)
from replay.storage.counters import LEASE_DRAWS, is_live, next_number, set_state
from replay.storage.format import schema
from replay.storage.format.rows import chunked, known
from replay.storage.format.schema import draws, iterations, trajectories
from replay.storage.statements import insert_columns
from replay.storage.validate import checked, refused
from replay.storage.write import add_metrics


@dataclass(frozen=True)
class ResumeReport:
    released: int
    """The number of released reservations, whose updates never happened."""
    rolled_back: int
    """The number of committed draws newer than the checkpoint."""
    orphaned: int
    """The number of trajectories newer than the checkpoint: they are kept and never drawn."""
    next_attempt: int
    """The attempt number of new trajectories; 0 for a run that has collected nothing."""
    sampler_state: dict[str, Any] | None
    """The sampler's state after the iteration resumed from; None before the first iteration."""
    fresh_again: int = 0
    """The number of workers' trajectories that were fresh or late since the checkpoint, and wait to be fresh again."""


_rows = trajectories.c
_COLUMNS = [field.name for field in fields(DrawRecord) if field.name != "state"]
_REALS = [column.key for column in draws.columns if isinstance(column.type, sa.Double)]


def reserve_again(connection: sa.Connection, records: Sequence[DrawRecord]) -> None:
    """Check and reserve draws, in place of earlier reservations of their slots."""
    checked(records, "iteration", "iteration")
    if records:
        slots = [record.slot for record in records]
        release(connection, records[0].run, records[0].iteration, slots, stream=records[0].stream)
    reserve(connection, records)


def release(connection: sa.Connection, run: str, iteration: int, slots: Sequence[int], *, stream: str) -> None:
    """Release the reservations of these slots, so that a draw repeated after a lost answer gives the same rows."""
    here = (draws.c.run == run) & (draws.c.iteration == iteration)
    reserved = sa.select(draws.c.slot).where(here, draws.c.state == RESERVED, draws.c.stream == stream)
    again = sorted(set(connection.scalars(reserved)).intersection(slots))
    for chunk in chunked(again):
        connection.execute(draws.delete().where(here, draws.c.slot.in_(chunk)))


def reserve(connection: sa.Connection, records: Sequence[DrawRecord]) -> None:
    if not records:
        return
    here = (draws.c.run == records[0].run) & (draws.c.iteration == records[0].iteration)
    taken = set(connection.scalars(sa.select(draws.c.slot).where(here)))
    for record in records:
        if record.slot in taken:
            where = f"iteration {record.iteration}"
            raise refused("slot", "be reserved once; resume the run to release it", record.slot, where)
        taken.add(record.slot)
    _insert(connection, records, state=RESERVED, sequence=next_number(connection, "draws"))


def _insert(connection: sa.Connection, records: Sequence[DrawRecord], *, state: str, sequence: int) -> None:
    columns: dict[str, Sequence[Any]] = {name: [getattr(record, name) for record in records] for name in _COLUMNS}
    columns |= {name: list(map(known, columns[name])) for name in _REALS}
    number = len(records)
    insert_columns(connection, draws, {**columns, "state": [state] * number, "sequence": [sequence] * number})


def commit(
    connection: sa.Connection,
    iteration: IterationRecord,
    records: Sequence[DrawRecord],
    *,
    sampler_state: Mapping[str, Any],
) -> None:
    """Store an iteration with its draws. A repeated commit of the same iteration and draws changes nothing."""
    where = f"iteration {iteration.iteration}"
    (row,) = checked([iteration], "iteration", "iteration")
    here = (iterations.c.run == iteration.run) & (iterations.c.iteration == iteration.iteration)
    stored = connection.execute(iterations.select().where(here)).mappings().one_or_none()
    _check_drawn(connection, iteration, records, state=RESERVED if stored is None else COMMITTED)
    if stored is not None:
        if dict(stored) != row:
            raise refused("iteration", f"be the committed {dict(stored)}", row, where)
        return
    connection.execute(draws.delete().where(draws.c.run == iteration.run, draws.c.iteration == iteration.iteration))
    if records:
        _insert(connection, records, state=COMMITTED, sequence=0)
        _count_uses(connection, [record.trajectory for record in records if record.stream == REPLAY])
        _end_waiting(connection, [record.trajectory for record in records if record.stream == FRESH])
    connection.execute(iterations.insert().values(row))
    add_metrics(connection, iteration.run, iteration.iteration, iteration.metrics)
    state = {"run": iteration.run, "iteration": iteration.iteration, "state": json.dumps(dict(sampler_state))}
    connection.execute(schema.sampler_state.insert().values(state))


def _check_drawn(
    connection: sa.Connection, iteration: IterationRecord, records: Sequence[DrawRecord], *, state: str
) -> None:
    """Raises InvalidRecord unless `records` are the iteration's draws in that state, and none has expired."""
    where = f"iteration {iteration.iteration}"
    live = sa.case((is_live(), 1), else_=0).label("live")
    mine = (draws.c.run == iteration.run) & (draws.c.iteration == iteration.iteration) & (draws.c.state == state)
    query = sa.select(draws.c.slot, draws.c.trajectory, live).where(mine)
    found = connection.execute(query.order_by(draws.c.slot)).all()
    given = {record.slot: record.trajectory for record in records}
    there = {row.slot: row.trajectory for row in found}
    if given != there:
        odd = min(slot for slot in {*given, *there} if given.get(slot) != there.get(slot))
        raise refused(f"draws[{odd}].trajectory", f"be the {state} {there.get(odd)!r}", given.get(odd), where)
    expired = [row.slot for row in found if state == RESERVED and not row.live]
    if expired:
        rule = f"be committed before {LEASE_DRAWS:,} others are reserved (go on with --resume)"
        raise refused(f"draws[{expired[0]}]", rule, "an expired reservation", where)


USES = (
    sa.select(sa.func.count())
    .where(draws.c.trajectory == trajectories.c.id, draws.c.state == COMMITTED, draws.c.stream == REPLAY)
    .correlate(trajectories)
    .scalar_subquery()
)
"""The number of committed replays of a row of `trajectories`. Its column `uses` must hold the same number."""


def _count_uses(connection: sa.Connection, ids: Sequence[str]) -> None:
    """Set `uses` of rows by their draws, so that every reader's next refresh sees it."""
    if not ids:
        return
    values = {"uses": USES, "changed": next_number(connection, "changed")}
    for chunk in chunked(list(dict.fromkeys(ids))):
        connection.execute(trajectories.update().where(trajectories.c.id.in_(chunk)).values(values))


def _end_waiting(connection: sa.Connection, ids: Sequence[str]) -> None:
    """Make waiting rows eligible after their update. Rows that the loop collected itself never waited."""
    for chunk in chunked(list(ids)):
        waited = sa.select(trajectories.c.id).where(trajectories.c.id.in_(chunk), trajectories.c.state == WAITING)
        set_state(connection, connection.scalars(waited).all(), ELIGIBLE)


def resume(connection: sa.Connection, run: str, iteration: int) -> ResumeReport:
    mine = draws.c.run == run
    replayed = (draws.c.stream == REPLAY) & (draws.c.state == COMMITTED)
    later_draws = sa.select(draws.c.trajectory).where(mine, draws.c.iteration > iteration, replayed)
    used_later = connection.scalars(later_draws).all()
    released = connection.execute(draws.delete().where(mine, draws.c.state == RESERVED)).rowcount
    rolled_back = connection.execute(draws.delete().where(mine, draws.c.iteration > iteration)).rowcount
    _count_uses(connection, used_later)
    for table in (iterations, schema.metrics, schema.sampler_state, schema.held_out):
        connection.execute(table.delete().where(table.c.run == run, table.c.iteration > iteration))
    published = schema.policies.c
    lost = (published.run == run) & (published.version > version_after(connection, run, iteration))
    connection.execute(schema.policies.delete().where(lost))
    # A worker's row is not collected again, for its ticket is done. So it is not orphaned.
    by_workers = sa.exists().where(schema.tickets.c.trajectory == _rows.id)
    state = _rows.state.in_([ELIGIBLE, UNTRAINABLE])
    later = trajectories.update().where(_rows.run == run, _rows.iteration > iteration, state, ~by_workers)
    stamp = {"state": ORPHANED, "changed": next_number(connection, "changed")}
    orphaned = connection.execute(later.values(stamp)).rowcount
    saved = schema.sampler_state.c
    stored = connection.scalar(sa.select(saved.state).where(saved.run == run, saved.iteration == iteration))
    sampler = None if stored is None else json.loads(stored)
    return ResumeReport(released, rolled_back, orphaned, _next_attempt(connection, run), sampler)


def version_after(connection: sa.Connection, run: str, iteration: int) -> int:
    """The policy version of a run after an iteration, which ends with one publish."""
    stood = (iterations.c.run == run) & (iterations.c.iteration <= iteration)
    last = connection.scalar(sa.select(sa.func.max(iterations.c.policy_version)).where(stood))
    return 0 if last is None else int(last) + 1


def _next_attempt(connection: sa.Connection, run: str) -> int:
    gone, groups = schema.reclaimed, schema.groups
    queries = (
        sa.select(sa.func.max(_rows.attempt)).where(_rows.run == run),
        sa.select(sa.func.max(gone.c.attempt)).join(groups, groups.c.id == gone.c.group).where(groups.c.run == run),
    )
    return max((int(highest) + 1 for query in queries if (highest := connection.scalar(query)) is not None), default=0)
