"""Whether everything stored is still what was written, and every name still names something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from typing import Any

import numpy as np
import sqlalchemy as sa

from context.authors import AuthorTable
from replay.errors import DamagedDatabase, InvalidRecord
from replay.records import ELIGIBLE, EVICTED, OPEN_GROUP, ORPHANED, QUARANTINED, STATES, WAITING, Trajectory
from replay.storage.counters import COUNTERS, last_number
from replay.storage.databases import Database
from replay.storage.draws import USES
from replay.storage.format.column_types import restored_column
from replay.storage.format.damage import dangling, misfits, raw, readable
from replay.storage.format.encoding import BlobError, decode_log_probs
from replay.storage.format.message_json import messages_of
from replay.storage.format.rows import chunked
from replay.storage.format.schema import groups, held_out, metadata, segments, token_scores, trajectories
from replay.storage.read import author_table, load
from replay.storage.validate import NOTHING_STORED, SUMMARY, validate

_BATCH = 64

_rows = trajectories.c


@dataclass
class Verification:
    """What was looked at, and what is wrong with it."""

    states: dict[str, int] = field(default_factory=dict)
    checked: int = 0
    """Rows whose tokens were read: neither evicted nor quarantined before."""
    corrupt: dict[str, str] = field(default_factory=dict)
    """Reason by id."""
    dangling: dict[str, int] = field(default_factory=dict)
    """Rows that name a missing one, by `table.column`."""
    damage: list[str] = field(default_factory=list)
    """What the database says about its own pages and indexes; cells that hold what can't have been written there, uses
    that were miscounted, counters, author tables, and blobs that nothing is drawn from."""

    @property
    def corrupt_share(self) -> float:
        return len(self.corrupt) / self.checked if self.checked else 0.0


def verify(database: Database, wanted: sa.ColumnElement[bool]) -> Verification:
    """Read every row: its cells, its blobs' checksums, its content hash, and its numbers against its tokens.

    Rows are read some at a time, each time as they are then: no snapshot is held for long, beside which a database
    would have to keep all that others write. So the answer is of no one moment. `states` are those at the beginning;
    a row that is written meanwhile is read or is not, and one that is evicted meanwhile is passed over.
    """
    found = Verification()
    counted = sa.select(raw(_rows.state), sa.func.count()).where(wanted).group_by(_rows.state)
    counts = database.read(lambda connection: {row[0]: int(row[1]) for row in connection.execute(counted)})
    found.states = {state: counts.pop(state) for state in STATES if state in counts}
    found.damage += [f"trajectories.state: {count} are {state!r}, which is none" for state, count in counts.items()]
    found.damage += database.read(database.damage)
    for table in metadata.sorted_tables:
        _look_at_cells(database, table, found)
        found.dangling |= database.read(partial(dangling, table=table))
    wrong_uses = sa.select(sa.func.count()).where(_rows.uses != USES)
    if miscounted := database.read(lambda connection: connection.scalar(wrong_uses)):
        found.damage.append(f"trajectories.uses: {miscounted} rows were used another number of times, by their draws")
    for counter in COUNTERS:
        with _noted(found):
            database.read(partial(last_number, counter=counter))
    _look_at_blobs(database, found)
    _look_at_rows(database, wanted, found)
    return found


@contextmanager
def _noted(found: Verification) -> Iterator[None]:
    try:
        yield
    except DamagedDatabase as error:
        found.damage.append(error.found)


def _pages(database: Database, table: sa.Table, query: sa.Select[Any]) -> Iterator[Sequence[sa.Row[Any]]]:
    """The query's rows in the order of the table's key, which they end with; each page as it is when it is asked for.

    A file's rows go by their numbers: a damaged key could not be asked for again.
    """
    is_file = database.path is not None
    key = [sa.literal_column(f"{table.name}.rowid")] if is_file else [raw(each) for each in table.primary_key]
    page = after = query.add_columns(*key).order_by(*key).limit(_BATCH)
    while rows := database.read(lambda connection: connection.execute(after).all()):  # noqa: B023  asked at once
        yield rows
        last = (
            sa.literal(each, sa.Text() if isinstance(each, str) else sa.BigInteger()) for each in rows[-1][-len(key) :]
        )
        after = page.where(sa.tuple_(*key) > sa.tuple_(*last))


def _look_at_cells(database: Database, table: sa.Table, found: Verification) -> None:
    """A line for each column with cells that hold what nobody can have written there. Rows that could not be drawn for
    it are corrupt: those of trajectories, and the members of groups."""
    columns = readable(table)
    wrong: Counter[str] = Counter()
    of_groups: list[str] = []
    for row in chain.from_iterable(_pages(database, table, sa.select(*map(raw, columns)))):
        misfitting = [column.name for column in misfits(columns, row)]
        wrong.update(misfitting)
        if misfitting and table is trajectories:
            found.corrupt[row[0]] = f"a value that nobody can have written in {misfitting[0]}"
        if misfitting and table is groups:
            of_groups.append(row[0])
    found.damage += [
        f"{table.name}.{name}: {count} hold what nobody can have written there" for name, count in wrong.items()
    ]
    for chunk in chunked(of_groups):
        members = sa.select(raw(_rows.id)).where(raw(_rows.group).in_(chunk))
        ids = database.read(lambda connection: connection.scalars(members).all())  # noqa: B023  asked at once
        found.corrupt |= dict.fromkeys(ids, "a group that holds what nobody can have written")


def _look_at_rows(database: Database, wanted: sa.ColumnElement[bool], found: Verification) -> None:
    authors: dict[str, AuthorTable | None] = {}
    query = sa.select(raw(_rows.id)).where(wanted, _rows.state.not_in([EVICTED, QUARANTINED]))
    for page in _pages(database, trajectories, query):
        with database.reading() as connection:
            loaded = load(connection, restored_column(_rows.id, [row[0] for row in page]))
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


def _look_at_blobs(database: Database, found: Verification) -> None:
    """What is drawn by nobody, so that there is nothing to quarantine: episodes of evaluations, and the scores of a
    later policy, which `agentloop replay rescore` makes again."""
    score, episode = token_scores.c, held_out.c
    segment = (segments.c.trajectory == score.trajectory) & (segments.c.position == score.position)
    scores = sa.select(raw(score.log_probs), raw(segments.c.num_tokens)).join_from(token_scores, segments, segment)
    said = sa.select(raw(episode.num_messages), raw(episode.said), raw(episode.checksum))
    decoders: list[tuple[sa.Table, sa.Select[Any], Callable[..., object]]] = [
        (token_scores, scores, decode_log_probs),
        (held_out, said, messages_of),
    ]
    for table, query, decoded in decoders:
        broken = 0
        for row in chain.from_iterable(_pages(database, table, query)):
            try:
                decoded(*row[: len(query.selected_columns)])
            except BlobError:
                broken += 1
        if broken:
            found.damage.append(f"{table.name}: {broken} are not what was written")
