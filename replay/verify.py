"""Whether everything stored is still what was written, and every name still names something."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

import sqlalchemy as sa

from context.authors import AuthorTable
from replay.blobs import BlobError, decode_log_probs
from replay.draws import USES
from replay.errors import InvalidRecord
from replay.histograms import decode
from replay.read import load
from replay.records import ELIGIBLE, EVICTED, ORPHANED, QUARANTINED, STATES, Trajectory
from replay.schema import draws, histograms, metadata, reclaimed, runs, segments, token_scores, trajectories
from replay.stats import chosen
from replay.store import ReplayStore
from replay.validate import validate

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
    """What the database says about its own pages and indexes; uses that were miscounted, histograms and scores."""

    @property
    def corrupt_share(self) -> float:
        return len(self.corrupt) / self.checked if self.checked else 0.0


def verify(store: ReplayStore, run: str | None = None, *, where: str | None = None) -> Verification:
    """Read every row: its blobs' checksums, its content hash, and its numbers against its tokens."""
    wanted = chosen(run, where)
    with store.reading() as connection:
        counted = sa.select(_rows.state, sa.func.count()).where(wanted).group_by(_rows.state)
        counts = {row[0]: int(row[1]) for row in connection.execute(counted)}
        found = Verification({state: counts[state] for state in STATES if state in counts})
        found.damage += store.damage(connection)
        found.damage += _miscounted(connection)
        found.damage += _told("histograms", _unreadable_histograms(connection))
        found.damage += _told("token_scores", _unreadable_scores(connection))
        found.dangling |= _dangling(connection)
        authors = {
            row[0]: AuthorTable.from_json(row[1]) for row in connection.execute(sa.select(runs.c.id, runs.c.authors))
        }
        query = sa.select(_rows.id).where(wanted, _rows.state.not_in([EVICTED, QUARANTINED]))
        ids = list(connection.scalars(query.order_by(_rows.run, _rows.iteration, _rows.slot, _rows.id)))
        for start in range(0, len(ids), _BATCH):
            _check(connection, ids[start : start + _BATCH], authors, found)
    return found


def _check(connection: sa.Connection, ids: list[str], authors: dict[str, AuthorTable], found: Verification) -> None:
    loaded = load(connection, ids)
    found.checked += len(loaded.whole) + len(loaded.corrupt)
    found.corrupt |= loaded.corrupt
    for run, rows in groupby(loaded.whole.values(), key=lambda row: row.record.run):
        found.corrupt |= dict(_wrong([_as_born(row) for row in rows], authors[run]))


def _as_born(row: Trajectory) -> Trajectory:
    """Orphans are made by a resume, of rows that were let in."""
    return replace(row, record=replace(row.record, state=ELIGIBLE)) if row.record.state == ORPHANED else row


def _wrong(rows: list[Trajectory], authors: AuthorTable) -> Iterator[tuple[str, str]]:
    """Rows that would not be let in now: all at once, and one by one only to name them."""
    try:
        validate(rows, authors)
    except InvalidRecord as error:
        if len(rows) == 1:
            yield rows[0].id, str(error).removesuffix(" Nothing of this call was stored.")
            return
        for row in rows:
            yield from _wrong([row], authors)


def _miscounted(connection: sa.Connection) -> list[str]:
    count = connection.scalar(sa.select(sa.func.count()).where(_rows.uses != USES))
    return [f"trajectories.uses: {count} rows were used another number of times, by their draws"] if count else []


def _told(table: str, broken: list[str]) -> list[str]:
    return [f"{table}: {len(broken)} are not what was written, the first of {broken[0]}"] if broken else []


def _unreadable_histograms(connection: sa.Connection) -> list[str]:
    """Of updates: nothing is drawn from them, so there is nothing to quarantine."""
    table, broken = histograms.c, []
    query = sa.select(table.run, table.iteration, table.counts).order_by(table.run, table.iteration)
    for run, iteration, blob in connection.execute(query.execution_options(yield_per=_BATCH)):
        try:
            decode(blob)
        except BlobError:
            broken.append(f"iteration {iteration} of run {run}")
    return broken


def _unreadable_scores(connection: sa.Connection) -> list[str]:
    """What a later policy gave stored tokens: `agentloop replay rescore` makes them anew."""
    table, of, broken = token_scores.c, segments.c, []
    mine = (of.trajectory == table.trajectory) & (of.position == table.position)
    query = sa.select(table.trajectory, table.position, table.log_probs, of.num_tokens).join_from(
        token_scores, segments, mine
    )
    query = query.order_by(table.trajectory, table.position).execution_options(yield_per=_BATCH)
    for trajectory, position, blob, count in connection.execute(query):
        try:
            decode_log_probs(blob, count)
        except BlobError:
            broken.append(f"segment {position} of trajectory {trajectory}")
    return broken


def _dangling(connection: sa.Connection) -> dict[str, int]:
    """By every reference between tables; a server keeps most of them itself, a file may be written by anything."""
    found = {}
    for table in metadata.sorted_tables:
        for reference in table.foreign_keys:
            target = reference.column.table.alias()
            there = sa.exists().where(target.c[reference.column.key] == reference.parent).correlate(table)
            query = sa.select(sa.func.count()).select_from(table).where(reference.parent.is_not(None), ~there)
            missing = connection.scalar(query)
            if missing:
                found[f"{table.name}.{reference.parent.name}"] = int(missing)
    stored, gone = (sa.exists().where(each.c.id == draws.c.trajectory) for each in (trajectories, reclaimed))
    missing = connection.scalar(sa.select(sa.func.count()).select_from(draws).where(~stored, ~gone))
    return {**found, "draws.trajectory": int(missing)} if missing else found
