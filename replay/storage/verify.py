"""Whether everything stored is still what was written, and every name still names something."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, groupby
from typing import Any

import numpy as np
import sqlalchemy as sa

from context.authors import AuthorTable
from replay.errors import DamagedCell, InvalidRecord
from replay.records import ELIGIBLE, EVICTED, OPEN_GROUP, ORPHANED, QUARANTINED, STATES, WAITING, Trajectory
from replay.storage.databases import Database
from replay.storage.draws import USES
from replay.storage.format.column_types import ExactText, Real, Truth, Whole
from replay.storage.format.encoding import BlobError, decode_log_probs
from replay.storage.format.ratio_histograms import decode
from replay.storage.format.schema import draws, histograms, metadata, reclaimed, segments, token_scores, trajectories
from replay.storage.format.token_summary import SUMMARY
from replay.storage.read import author_table, load
from replay.storage.validate import NOTHING_STORED, validate

_BATCH = 64

_rows = trajectories.c


@dataclass
class Verification:
    """What was looked at, and what is wrong with it."""

    states: dict[str, int]
    checked: int = 0
    """Rows whose tokens were read: neither evicted nor quarantined before."""
    corrupt: dict[str, str] = field(default_factory=dict)
    """Reason by id."""
    dangling: dict[str, int] = field(default_factory=dict)
    """Rows that name a missing one, by `table.column`."""
    damage: list[str] = field(default_factory=list)
    """What the database says about its own pages and indexes; cells that hold what can't have been written there, uses
    that were miscounted, author tables, histograms and scores."""

    @property
    def corrupt_share(self) -> float:
        return len(self.corrupt) / self.checked if self.checked else 0.0


def verify(database: Database, wanted: sa.ColumnElement[bool]) -> Verification:
    """Read every row: its blobs' checksums, its content hash, and its numbers against its tokens.

    Rows are read some at a time, each time as they are then: no snapshot is held for long, beside which a database
    would have to keep all that others write. So the answer is of no one moment. `states` are those at the beginning;
    a row that is written meanwhile is read or is not, by its id, and one that is evicted meanwhile is passed over.
    What the database says of its own pages it looks at in one go.
    """
    found = Verification({})
    for look in (_count_states, _look_at_pages, _look_at_uses, _look_at_histograms, _look_at_scores):
        with _noted(found):
            look(database, wanted, found)
    for table in metadata.sorted_tables:
        with database.reading() as connection:
            found.damage += _damaged_cells(connection, table)
            found.dangling |= _dangling(connection, table)
    with _noted(found):
        _look_at_rows(database, wanted, found)
    return found


@contextmanager
def _noted(found: Verification) -> Iterator[None]:
    """What can't be read is noted beside what else there is."""
    try:
        yield
    except DamagedCell as error:
        found.damage += [] if str(error) in found.damage else [str(error)]


_Rows = sa.ColumnElement[bool]


def _count_states(database: Database, wanted: _Rows, found: Verification) -> None:
    counted = sa.select(_rows.state, sa.func.count()).where(wanted).group_by(_rows.state)
    with database.reading() as connection:
        counts = {row[0]: int(row[1]) for row in connection.execute(counted)}
    found.states = {state: counts.pop(state) for state in STATES if state in counts}
    found.damage += [f"trajectories.state: {count} are {state!r}, which is none" for state, count in counts.items()]


def _look_at_pages(database: Database, wanted: _Rows, found: Verification) -> None:
    with database.reading() as connection:
        found.damage += database.damage(connection)


def _pages(database: Database, query: sa.Select[Any], *key: sa.ColumnElement[Any]) -> Iterator[Sequence[sa.Row[Any]]]:
    """Rows in the order of their key, which their values begin with; each page as it is when it is asked for."""
    page = query.order_by(*key).limit(_BATCH)
    last: Sequence[Any] | None = None
    while True:
        later = sa.tuple_(*key) > sa.tuple_(*map(sa.literal, last, (each.type for each in key))) if last else sa.true()
        with database.reading() as connection:
            rows = connection.execute(page.where(later)).all()
        if not rows:
            return
        yield rows
        last = rows[-1][: len(key)]


def _look_at_rows(database: Database, wanted: _Rows, found: Verification) -> None:
    authors: dict[str, AuthorTable | None] = {}
    query = sa.select(_rows.id).where(wanted, _rows.state.not_in([EVICTED, QUARANTINED]))
    for page in _pages(database, query, _rows.id):
        with database.reading() as connection:
            loaded = load(connection, [row.id for row in page])
            for run in {row.record.run for row in loaded.whole.values()} - authors.keys():
                authors[run] = None
                with _noted(found):
                    authors[run] = author_table(connection, run)
        found.checked += len(loaded.whole) + len(loaded.corrupt)
        found.corrupt |= loaded.corrupt
        for run, rows in groupby(loaded.whole.values(), key=lambda row: row.record.run):
            table = authors[run]
            if table is not None:
                found.corrupt |= dict(_wrong([_as_collected(row) for row in rows], table))


def _as_collected(row: Trajectory) -> Trajectory:
    """Orphans are made by a resume, of rows that were let in; what is still to be fresh is eligible later."""
    is_other = row.record.state in (ORPHANED, OPEN_GROUP, WAITING)
    return replace(row, record=replace(row.record, state=ELIGIBLE)) if is_other else row


def _wrong(rows: list[Trajectory], authors: AuthorTable) -> Iterator[tuple[str, str]]:
    """Rows that would not be let in now: all at once, and one by one only to name them."""
    try:
        found = validate(rows, authors)
    except InvalidRecord as error:
        if len(rows) == 1:
            yield rows[0].id, str(error).removesuffix(NOTHING_STORED)
            return
        for row in rows:
            yield from _wrong([row], authors)
        return
    stored = np.array([[getattr(row.record, name) for name in SUMMARY] for row in rows], np.float64)
    facts = np.array([[each.row[name] for name in SUMMARY] for each in found], np.float64)
    # Means of float32 have been rounded in several ways.
    for at, place in np.argwhere(~np.isclose(stored, facts, rtol=1e-6, atol=1e-3, equal_nan=True)).tolist():
        rule = f"agree with the segments ({facts[at, place]:.6g})"
        yield rows[at].id, f"{SUMMARY[place]} must {rule}, got {stored[at, place]:.6g}."


def _look_at_uses(database: Database, wanted: _Rows, found: Verification) -> None:
    with database.reading() as connection:
        count = connection.scalar(sa.select(sa.func.count()).where(_rows.uses != USES))
    if count:
        found.damage.append(f"trajectories.uses: {count} rows were used another number of times, by their draws")


def _note_unreadable(found: Verification, table: str, blobs: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Each blob by what it is of, with what decodes it."""
    broken = []
    for name, decoded in blobs:
        try:
            decoded()
        except BlobError:
            broken.append(name)
    if broken:
        found.damage.append(f"{table}: {len(broken)} are not what was written, the first of {broken[0]}")


def _look_at_histograms(database: Database, wanted: _Rows, found: Verification) -> None:
    """Nothing is drawn from them, so there is nothing to quarantine."""
    key = [histograms.c[name] for name in ("run", "iteration", "quantity", "stream", "age")]
    rows = chain.from_iterable(_pages(database, sa.select(*key, histograms.c.counts), *key))
    blobs = ((f"iteration {row.iteration} of run {row.run}", partial(decode, row.counts)) for row in rows)
    _note_unreadable(found, "histograms", blobs)


def _look_at_scores(database: Database, wanted: _Rows, found: Verification) -> None:
    """What a later policy gave stored tokens: `agentloop replay rescore` makes them anew."""
    table, of = token_scores.c, segments.c
    mine = (of.trajectory == table.trajectory) & (of.position == table.position)
    query = sa.select(table.trajectory, table.position, table.log_probs, of.num_tokens)
    pages = _pages(database, query.join_from(token_scores, segments, mine), table.trajectory, table.position)
    blobs = (
        (
            f"segment {row.position} of trajectory {row.trajectory}",
            partial(decode_log_probs, *row[2:]),
        )
        for row in chain.from_iterable(pages)
    )
    _note_unreadable(found, "token_scores", blobs)


_STORED = {ExactText: ("text",), Whole: ("integer",), Real: ("real",), Truth: ("integer",)}
"""What SQLite calls the contents of columns."""


def _damaged_cells(connection: sa.Connection, table: sa.Table) -> list[str]:
    """A line for each column of the table with cells of another kind than the column's, whose contents are not read.

    A server keeps its types and its NOT NULL itself; in a file, one bit makes a text of a number.
    """
    found = connection.execute(_cell_counts(table, connection.dialect.name == "sqlite")).one()
    return [
        f"{table.name}.{column.name}: {count} hold what nobody can have written there"
        for column, count in zip(table.columns, found, strict=True)
        if count
    ]


@cache
def _cell_counts(table: sa.Table, is_file: bool) -> sa.Executable:
    return sa.select(*(sa.func.count().filter(_is_other(column, is_file)) for column in table.columns)).select_from(
        table
    )


def _is_other(column: sa.Column[Any], is_file: bool) -> sa.ColumnElement[bool]:
    missing = sa.false() if column.nullable else column.is_(None)
    if not is_file:
        return missing
    names = next((names for kind, names in _STORED.items() if isinstance(column.type, kind)), ("blob",))
    return missing | (column.is_not(None) & sa.func.typeof(column).not_in(names))


def _dangling(connection: sa.Connection, table: sa.Table) -> dict[str, int]:
    """By each of the table's references; a server keeps most of them itself, a file may be written by anything."""
    counts = {name: connection.scalar(query) for name, query in _references(table).items()}
    return {name: int(count) for name, count in counts.items() if count}


@cache
def _references(table: sa.Table) -> dict[str, sa.Select[Any]]:
    """How many rows of the table name one that is not there, by `table.column`."""
    found = {}
    for reference in table.foreign_keys:
        target = reference.column.table.alias()
        there = sa.exists().where(target.c[reference.column.key] == reference.parent).correlate(table)
        missing = sa.select(sa.func.count()).select_from(table).where(reference.parent.is_not(None), ~there)
        found[f"{table.name}.{reference.parent.name}"] = missing
    if table is draws:
        stored, gone = (sa.exists().where(each.c.id == draws.c.trajectory) for each in (trajectories, reclaimed))
        found["draws.trajectory"] = sa.select(sa.func.count()).select_from(draws).where(~stored, ~gone)
    return found
