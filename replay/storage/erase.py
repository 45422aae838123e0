"""Removing content for good, and searching the database's own files for what was removed.

Of a row stays what is left of any evicted one (`replay.storage.reclaimed`), so that lineage still tells what it fed:
weights that learned from it are not changed by forgetting it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.records import COMMITTED, FORGOTTEN
from replay.storage.databases.backup import COPY
from replay.storage.format.column_types import ExactText, to_storable
from replay.storage.format.messages import stored_texts
from replay.storage.format.rows import chunked
from replay.storage.format.schema import draws, messages, metadata, segments, tasks, trajectories
from replay.storage.reclaimed import reclaim

_PIECE = 24
"""Bytes (of texts: characters) of a piece that is searched for."""
_LEAST = 8
"""Bytes of the shortest piece: shorter texts are everywhere."""
_MOST_PIECES = 60_000
_WINDOW = 1 << 24
_TABLE_BITS = 20
"""Of the table that tells most words of a file from the beginnings of pieces: it fits a processor's cache."""
_BLOB_HEAD = 16
"""Bytes at the beginning of a blob that many have in common."""


_rows = trajectories.c
Bytes = npt.NDArray[np.uint8]


@dataclass
class Traces:
    """What was removed, and pieces of it by which it would be recognised."""

    trajectories: int = 0
    messages: int = 0
    tasks: int = 0
    updates: int = 0
    """Committed draws of these rows."""
    ids: list[str] = field(default_factory=list)
    pieces: set[bytes] = field(default_factory=set)
    complete: bool = True
    """False: there was too much to remember pieces of everything."""

    def add(self, *contents: str | bytes | None) -> None:
        for content in contents:
            if not content:
                continue
            if len(self.pieces) >= _MOST_PIECES:
                self.complete = False
                return
            body = content if isinstance(content, str) else content[_BLOB_HEAD:]
            # A page of the file may end anywhere: it can't cut all three.
            for start in {0, max(0, len(body) // 2 - _PIECE // 2), max(0, len(body) - _PIECE)}:
                part = body[start : start + _PIECE]
                piece = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
                if len(piece) >= _LEAST and len(set(piece)) > 2:
                    self.pieces.add(piece)


@dataclass(frozen=True)
class Proof:
    """What a search of the database's files found."""

    files: tuple[str, ...]
    """Empty for a server, whose files are its own."""
    searched: int
    """Pieces of removed texts and blobs."""
    kept: int
    """Pieces that rows which were kept also hold."""
    left: tuple[str, ...]
    """Files in which others were found."""


def marked(connection: sa.Connection, rows: sa.ColumnElement[bool]) -> list[str]:
    """Rows the filter holds for; what is left of others has nothing to forget."""
    query = sa.select(_rows.id).where(rows).order_by(_rows.iteration, _rows.slot, _rows.id)
    return list(connection.scalars(query))


def count(connection: sa.Connection, ids: Sequence[str]) -> Traces:
    """What forgetting them would remove."""
    found = Traces(trajectories=len(ids), ids=list(ids), tasks=len(_tasks_of_none_but(connection, ids)))
    for chunk in chunked(ids):
        said = sa.select(sa.func.sum(messages.c.num_messages)).where(messages.c.trajectory.in_(chunk))
        used = sa.select(sa.func.count()).where(draws.c.trajectory.in_(chunk), draws.c.state == COMMITTED)
        found.messages += int(connection.scalar(said) or 0)
        found.updates += connection.scalar(used) or 0
    return found


def forget(connection: sa.Connection, ids: Sequence[str]) -> Traces:
    """Remove the content of these rows and of tasks that no other row has."""
    traces = count(connection, ids)
    orphaned_tasks = _tasks_of_none_but(connection, ids)
    for chunk in chunked(ids):
        traces.add(*connection.scalars(sa.select(segments.c.tokens).where(segments.c.trajectory.in_(chunk))))
        for said in connection.scalars(sa.select(messages.c.said).where(messages.c.trajectory.in_(chunk))):
            # Texts too, as a database of an earlier schema has them: a copy of one may stand beside this one.
            traces.add(said, *stored_texts(said))
    for chunk in chunked(orphaned_tasks):
        for payload in connection.scalars(sa.select(_stored(tasks.c.payload)).where(tasks.c.hash.in_(chunk))):
            traces.add(payload)
    reclaim(connection, ids, FORGOTTEN)
    return traces


def _tasks_of_none_but(connection: sa.Connection, ids: Sequence[str]) -> list[str]:
    mine = set(ids)
    named: set[str] = set()
    for chunk in chunked(ids):
        named.update(connection.scalars(sa.select(_rows.task).where(_rows.id.in_(chunk)).distinct()))
    others: set[str] = set()
    for chunk in chunked(sorted(named)):
        found = connection.execute(sa.select(_rows.task, _rows.id).where(_rows.task.in_(chunk)))
        others.update(task for task, id in found if id not in mine)
    return sorted(named - others)


def proof(connection: sa.Connection, traces: Traces, path: Path | None) -> Proof:
    """Search the database's file and everything beside it that begins with its name."""
    if path is None:
        return Proof((), 0, 0, ())
    files = sorted(file for file in path.parent.iterdir() if file.name.startswith(path.name) and file.is_file())
    found = {file: set(_found(_windows(file), traces.pieces)) for file in files}
    suspects = set().union(*found.values())
    kept = _kept(connection, suspects) if suspects else set()
    left = tuple(str(file) for file in files if found[file] - kept or _is_copy_with(file, path, traces.ids))
    return Proof(tuple(map(str, files)), len(traces.pieces), len(kept), left)


def _is_copy_with(file: Path, path: Path, ids: Sequence[str]) -> bool:
    """Whether it is a copy that a migration kept, in which some of these rows have content.

    What it holds is laid out as in an earlier schema: pieces of today's are not to be found in it.
    """
    if not file.name.endswith(COPY) or file.name == path.name:
        return False
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as copy:
        return any(
            copy.execute(f"SELECT 1 FROM {table} WHERE trajectory = ? LIMIT 1", (to_storable(id),)).fetchone()  # noqa: S608
            for id in ids
            for table in ("segments", "messages")
        )


def _kept(connection: sa.Connection, pieces: set[bytes]) -> set[bytes]:
    """Those that stand in a row of some table."""
    kept: set[bytes] = set()
    for table in metadata.sorted_tables:
        columns = [_stored(c) for c in table.c if isinstance(c.type, (ExactText, sa.LargeBinary))]
        for rows in connection.execute(sa.select(*columns)).partitions(1000) if columns else ():
            values = [value for row in rows for value in row if value]
            if table is messages:
                values += [text for row in rows for text in stored_texts(row.said)]
            blob = b"\0".join(value if isinstance(value, bytes) else value.encode() for value in values)
            kept.update(piece for piece in pieces - kept if piece in blob)
    return kept


def _windows(file: Path) -> Iterator[bytes]:
    """Overlapping by more than the longest piece."""
    overlap = b""
    with file.open("rb") as stream:
        while block := stream.read(_WINDOW):
            yield overlap + block
            overlap = (overlap + block)[-4 * _PIECE :]


def _found(windows: Iterable[bytes], pieces: set[bytes]) -> Iterator[bytes]:
    """Looks for the first 8 bytes of all pieces at once, at every offset, and then for the whole of a piece."""
    by_head: dict[int, list[bytes]] = {}
    for piece in pieces:
        by_head.setdefault(int.from_bytes(piece[:8], "little"), []).append(piece)
    heads = np.array(sorted(by_head), np.uint64)
    if not len(heads):
        return
    likely = np.zeros(1 << _TABLE_BITS, np.bool_)
    likely[_folded(heads)] = True
    for window in windows:
        for offset in range(8):
            words = np.frombuffer(window, "<u8", count=max(0, len(window) - offset) // 8, offset=offset)
            candidates = np.flatnonzero(likely[_folded(words)])
            for position in candidates[np.isin(words[candidates], heads)].tolist():
                start = offset + 8 * position
                yield from (p for p in by_head[int(words[position])] if window.startswith(p, start))


def _folded(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """[N] below 2^_TABLE_BITS: Fibonacci hashing."""
    return (words * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - _TABLE_BITS)


def _stored(column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """A text as the database has it."""
    return sa.type_coerce(column, sa.Text) if isinstance(column.type, ExactText) else column
