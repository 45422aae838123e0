"""Verifies that all stored values equal what was written, and that every reference names a row."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import sqlalchemy as sa

from replay.errors import ReplayError
from replay.records import EVICTED, QUARANTINED, STATES, Trajectory
from replay.storage.databases import Database
from replay.storage.draw_records import USES
from replay.storage.format.column_types import restored_column
from replay.storage.format.damage import dangling, misfits, raw, wrong_authors
from replay.storage.format.encoding import BlobError, content_hash, decode_log_probs
from replay.storage.format.rows import messages_of
from replay.storage.format.schema import groups, held_out, metadata, sessions, token_scores, trajectories
from replay.storage.read import load
from replay.storage.sessions import session_nodes_of
from replay.storage.statements import selected

_BATCH = 64

_rows = trajectories.c


@dataclass
class Verification:
    states: dict[str, int] = field(default_factory=dict)
    """The number of rows by state."""
    checked: int = 0
    """The number of rows whose tokens were read. Evicted and quarantined rows are not."""
    corrupt: dict[str, str] = field(default_factory=dict)
    """The reason for each corrupt row, by id."""
    damage: list[str] = field(default_factory=list)
    """A line for all other damage: of the database's pages and indexes, cells that can't have been written, names of
    missing rows, wrong numbers of uses, author tables, and blobs that no draw reads."""

    @property
    def corrupt_share(self) -> float:
        return len(self.corrupt) / self.checked if self.checked else 0.0


def verify(database: Database, wanted: sa.ColumnElement[bool]) -> Verification:
    """Read every row: its cells, its checksums and its content hash.

    Rows are read in small batches, each at one moment, because during a long snapshot a database must keep everything
    that others write. All cells of a table are read at once. `states` are the states at the beginning. Rows that others
    write or evict meanwhile are skipped.
    """
    counted = sa.select(raw(_rows.state), sa.func.count()).where(wanted).group_by(_rows.state)
    counts = database.read(lambda connection: {row[0]: int(row[1]) for row in connection.execute(counted)})
    found = Verification({state: counts[state] for state in sorted(counts, key=[*STATES, *counts].index)})
    found.damage += database.read(database.damage)
    for table in metadata.sorted_tables:
        database.read(partial(_look_at_cells, table=table, found=found))
        found.damage += database.read(lambda connection: list(dangling(connection, table)))  # noqa: B023  now
    wrong_uses = sa.select(sa.func.count()).where(_rows.uses != USES)
    if miscounted := database.read(lambda connection: connection.scalar(wrong_uses)):
        found.damage.append(f"trajectories.uses: {miscounted} rows were used another number of times, by their draws")
    found.damage += database.read(lambda connection: list(wrong_authors(connection)))
    _look_at_rows(database, wanted, found)
    _look_at_blobs(database, found)
    return found


def _look_at_cells(connection: sa.Connection, table: sa.Table, found: Verification) -> None:
    """Add a line for each column with cells that can't have been written. A trajectory with one, or in a group with
    one, is corrupt: no draw could use it."""
    wrong: Counter[str] = Counter()
    for id, names in misfits(connection, table):
        wrong.update(names)
        if table is trajectories:
            found.corrupt[id] = f"a value that nobody can have written in {names[0]}"
        if table is groups:
            members = connection.scalars(sa.select(raw(_rows.id)).where(raw(_rows.group) == id))
            found.corrupt |= dict.fromkeys(members, "a group that holds what nobody can have written")
    found.damage += [
        f"{table.name}.{name}: {count} hold what nobody can have written there" for name, count in wrong.items()
    ]


def _look_at_rows(database: Database, wanted: sa.ColumnElement[bool], found: Verification) -> None:
    query = sa.select(raw(_rows.id)).where(wanted, _rows.state.not_in([EVICTED, QUARANTINED]))
    ids = restored_column(_rows.id, database.read(lambda connection: connection.scalars(query).all()))
    wrong_scores = 0
    for start in range(0, len(ids), _BATCH):
        loaded = database.read(lambda connection: load(connection, ids[start : start + _BATCH]))  # noqa: B023  now
        found.checked += len(loaded.whole) + len(loaded.corrupt)
        found.corrupt |= loaded.corrupt
        for row in loaded.whole.values():
            if content_hash(row.segments) != row.record.content_hash:
                found.corrupt[row.id] = "tokens of another content hash"
        whole = loaded.whole
        wrong_scores += database.read(lambda connection: _wrong_scores(connection, whole))  # noqa: B023  now
    if wrong_scores:
        found.damage.append(f"token_scores: {wrong_scores} are not what was written")


def _wrong_scores(connection: sa.Connection, rows: Mapping[str, Trajectory]) -> int:
    """The number of stored scores of these rows that are damaged or have another length than their segment."""
    score, count = token_scores.c, 0
    columns = [score.trajectory, raw(score.position), raw(score.log_probs)]
    for row in selected(connection, columns, score.trajectory, list(rows)):
        try:
            decode_log_probs(row.log_probs, len(rows[row.trajectory].segments[row.position].tokens))
        except (BlobError, LookupError, TypeError):
            count += 1
    return count


def _look_at_blobs(database: Database, found: Verification) -> None:
    """Check episodes of evaluations and sessions under way. They are never drawn, so nothing is quarantined."""
    episode, wrong = held_out.c, Counter[str]()
    said = sa.select(raw(episode.num_messages), raw(episode.said), raw(episode.checksum))

    def look(connection: sa.Connection) -> None:
        for row in connection.execute(said.execution_options(yield_per=_BATCH)):
            try:
                messages_of(*row)
            except BlobError:
                wrong[held_out.name] += 1
        for id in connection.scalars(sa.select(sessions.c.id)).all():
            try:
                session_nodes_of(connection, id)
            except ReplayError:
                wrong[sessions.name] += 1

    database.read(look)
    found.damage += [f"{name}: {count} are not what was written" for name, count in wrong.items()]
