"""Eviction: rows over the buffer's limits are deleted, the oldest first by (iteration, slot).

It has two steps. At the end of an iteration the state of these rows becomes `evicted`, and no later draw takes them.
They are deleted when every checkpoint that a resume could start from is newer; `replay.storage.tombstones` keeps a few
facts. Until then a resume restores their state, so that a resumed run draws what an uninterrupted one does.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from pydantic import Field

from replay.records import ELIGIBLE, EVICTED, OPEN_GROUP, ORPHANED, QUARANTINED, REDACTED, WAITING
from replay.setting_types import Positive, Section
from replay.storage.counters import is_live, set_state
from replay.storage.format.schema import draws, trajectories
from replay.storage.tombstones import reclaim

_EVICTED_AT = re.compile(r"at iteration ([0-9]+), was ([a-z]+)$")
_PAGE = 1000

_rows = trajectories.c
_SIZE = sa.func.coalesce(_rows.num_bytes, 0)
_COUNT = sa.func.count()
_IS_RESERVED = sa.exists().where(draws.c.trajectory == _rows.id, is_live()).correlate(trajectories)
_HAS_CONTENT = sa.or_(_rows.state != EVICTED, _rows.state_reason == REDACTED)
"""The row has content, and no rule has evicted it yet. A redacted row is stored as evicted, but has its messages."""
_TO_BE_FRESH = _rows.state.in_([OPEN_GROUP, WAITING])
_ORDER = (_rows.iteration, _rows.slot, _rows.id)


class Capacity(Section):
    """Limits on the rows that a run keeps. Over a limit, the oldest rows lose their content."""

    rows: Positive | None = Field(None, description="Most rows.")
    bytes: Positive | None = Field(None, description="Most bytes of their tokens and messages, compressed.")
    age: Positive | None = Field(None, description="Most iterations since a row was collected.")

    def __bool__(self) -> bool:
        return self != Capacity()


@dataclass(frozen=True)
class Evicted:
    rows: int
    bytes: int
    by_rule: dict[str, int]
    """The number of rows by the limit that they were over."""

    def metrics(self) -> dict[str, float]:
        metrics = {"buffer/evicted": float(self.rows), "buffer/evicted_bytes": float(self.bytes)}
        return metrics | {f"buffer/evicted_by_{rule}": float(count) for rule, count in self.by_rule.items()}


@dataclass(frozen=True)
class StoredRow:
    id: str
    state: str
    """The state that a resume restores; `redacted` for a redacted row, whose state was always evicted."""
    bytes: int


Over = Mapping[str, Sequence[StoredRow]]
"""The rows to evict, by rule."""


def over_capacity(
    connection: sa.Connection, run: str, iteration: int, capacity: Capacity
) -> dict[str, list[StoredRow]]:
    """Find the rows to evict after `iteration`, by rule. Reserved rows, rows of the iteration itself, and rows that an
    update will still use as fresh are never among them.

    Orphaned rows go first and count in no limit, because an uninterrupted run has none. Then rows that can't be drawn
    go before rows that can, the oldest first.
    """
    if not capacity:
        return {}
    may_go = sa.and_(_kept(run), _rows.iteration < iteration, ~_IS_RESERVED, ~_TO_BE_FRESH)
    orphans = _streamed(connection, _rows.run == run, _rows.state == ORPHANED, ~_IS_RESERVED)
    found, gone = {ORPHANED: list(orphans)}, set[str]()

    def add(rule: str, rows: Iterable[StoredRow]) -> None:
        found[rule] = [row for row in rows if row.id not in gone]
        gone.update(row.id for row in found[rule])

    if capacity.age is not None:
        add("age", _streamed(connection, may_go, _rows.iteration < iteration - capacity.age))
    if capacity.rows is not None:
        count = connection.scalar(sa.select(_COUNT).where(_kept(run))) or 0
        add("rows", _oldest(connection, may_go, gone, rows=count - len(gone) - capacity.rows))
    if capacity.bytes is not None:
        freed = sum(row.bytes for rows in found.values() for row in rows if row.id in gone)
        size = int(connection.scalar(sa.select(sa.func.sum(_SIZE)).where(_kept(run))) or 0)
        add("bytes", _oldest(connection, may_go, gone, bytes=size - freed - capacity.bytes))
    return {rule: rows for rule, rows in found.items() if rows}


def evict(connection: sa.Connection, over: Over, *, iteration: int) -> Evicted:
    """Do the first step of an eviction: set state and reason. The rows stay stored until `reclaim`."""
    for rule, rows in over.items():
        for state in dict.fromkeys(row.state for row in rows):
            reason = f"capacity.{rule} at iteration {iteration}, was {state}"
            set_state(connection, [row.id for row in rows if row.state == state], EVICTED, reason)
    # Orphaned rows are not counted, so that a resumed run has the metrics of an uninterrupted one.
    counted = {rule: rows for rule, rows in over.items() if rule != ORPHANED}
    sizes = [row.bytes for rows in counted.values() for row in rows]
    return Evicted(len(sizes), sum(sizes), {rule: len(rows) for rule, rows in counted.items()})


def evicted_through(connection: sa.Connection, run: str, iteration: int) -> list[str]:
    """The ids of rows evicted up to `iteration`, for the second step, `reclaim`."""
    return [id for id, at, _ in _evicted(connection, run) if at <= iteration]


def restore(connection: sa.Connection, run: str, iteration: int) -> None:
    """Restore the state of rows evicted after `iteration`. The resume itself orphans rows collected after it."""
    back = [(id, state) for id, at, state in _evicted(connection, run) if at > iteration]
    for state in dict.fromkeys(state for _, state in back):
        given = (EVICTED, REDACTED) if state == REDACTED else (state, None)
        set_state(connection, [id for id, was in back if was == state], *given)


def prune(connection: sa.Connection, run: str | None, rows: sa.ColumnElement[bool], *, dry_run: bool) -> Evicted:
    """Do both steps of an eviction at once, for the rows of `run`, or of every run, that meet `rows`. No resume
    restores them. Reserved rows, and rows that will still be fresh, are never among them."""
    mine = sa.true() if run is None else _rows.run == run
    found = list(_streamed(connection, mine, _HAS_CONTENT, ~_IS_RESERVED, ~_TO_BE_FRESH, rows))
    if not dry_run:
        reclaim(connection, [row.id for row in found], "pruned by where")
    return Evicted(len(found), sum(row.bytes for row in found), {})


def buffer_metrics(connection: sa.Connection, run: str) -> dict[str, float]:
    """Measure the stored rows that the run itself collected."""
    drawable, corrupt = (_COUNT.filter(_rows.state == state) for state in (ELIGIBLE, QUARANTINED))
    query = sa.select(_COUNT, drawable, corrupt, sa.func.coalesce(sa.func.sum(_SIZE), 0)).where(_kept(run))
    names = ("buffer/rows", "buffer/eligible", "buffer/quarantined", "buffer/bytes")
    return {name: float(value) for name, value in zip(names, connection.execute(query).one(), strict=True)}


def _kept(run: str) -> sa.ColumnElement[bool]:
    return sa.and_(_rows.run == run, _rows.state != ORPHANED, _HAS_CONTENT)


def _streamed(
    connection: sa.Connection, *conditions: sa.ColumnElement[bool], drawable_last: bool = False
) -> Iterator[StoredRow]:
    """Yield the rows that meet the conditions, the oldest first, with one page of rows in memory."""
    state = sa.case((_rows.state == EVICTED, REDACTED), else_=_rows.state)
    query = sa.select(_rows.id, state, _SIZE).where(*conditions)
    order = [sa.case((_rows.state == ELIGIBLE, 1), else_=0)] if drawable_last else []
    with connection.execute(query.order_by(*order, *_ORDER).execution_options(yield_per=_PAGE)) as found:
        yield from (StoredRow(*row) for row in found)


def _oldest(
    connection: sa.Connection, may_go: sa.ColumnElement[bool], gone: set[str], *, rows: int = 0, bytes: int = 0
) -> list[StoredRow]:
    """Find the oldest rows that together free at least these `rows` and `bytes`."""
    taken: list[StoredRow] = []
    freed = 0
    for row in _streamed(connection, may_go, drawable_last=True) if rows > 0 or bytes > 0 else ():
        if len(taken) >= rows and freed >= bytes:
            break
        if row.id not in gone:
            taken.append(row)
            freed += row.bytes
    return taken


def _evicted(connection: sa.Connection, run: str) -> Iterator[tuple[str, int, str]]:
    """(id, iteration of the eviction, state before it) of each evicted row."""
    query = sa.select(_rows.id, _rows.state_reason).where(_rows.run == run, _rows.state == EVICTED)
    for id, reason in connection.execute(query.order_by(*_ORDER)).all():
        if match := _EVICTED_AT.search(reason or ""):
            yield id, int(match[1]), match[2]
