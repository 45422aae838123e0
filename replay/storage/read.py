"""Reads whole trajectories, and finds damaged ones."""

import json
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from context.authors import AuthorTable
from context.messages import Message
from context.tokens.session_nodes import checked_nodes
from context.tokens.session_segments import segments_of
from replay.errors import ContentGone, CorruptTrajectory, ReplayError
from replay.records import EVICTED, QUARANTINED, TaskRecord, Trajectory
from replay.storage.counters import set_state
from replay.storage.format import rows
from replay.storage.format.encoding import BlobError, content_hash
from replay.storage.format.schema import messages, nodes, runs, segments, tasks, trajectories
from replay.storage.statements import rows_by_key, selected
from replay.storage.tombstones import reasons

_RECORDS = (*rows.CHECKED_COLUMNS, trajectories.c.record_checksum, trajectories.c.state_reason)
_SEGMENTS = (segments.c.trajectory, *rows.SEGMENT_COLUMNS)
_NODES = (nodes.c.trajectory, *rows.NODE_COLUMNS)
_NODE_ORDER = (nodes.c.trajectory, nodes.c.number)
_SEGMENT_ORDER = (segments.c.trajectory, segments.c.position)
_NUM_MESSAGES, _SEGMENTS_CHECKSUM = (
    rows.CHECKED_COLUMNS.index(trajectories.c[name]) for name in ("num_messages", "segments_checksum")
)


@dataclass
class Loaded:
    whole: dict[str, Trajectory] = field(default_factory=dict)
    corrupt: dict[str, str] = field(default_factory=dict)
    """Reason by id."""
    without_tokens: dict[str, Trajectory] = field(default_factory=dict)
    """Redacted rows: they were stored without their tokens because their messages were changed."""
    gone: dict[str, str | None] = field(default_factory=dict)
    """The reason why a row has no tokens, by id: for redacted rows, and for deleted rows."""

    def in_order(self, ids: Sequence[str]) -> list[Trajectory]:
        """The rows of these ids. Raises an error for the first that is corrupt, evicted or unknown."""
        for id in ids:
            if id in self.gone:
                raise ContentGone(id, self.gone[id])
            if id in self.corrupt:
                raise CorruptTrajectory(id, self.corrupt[id])
            if id not in self.whole:
                raise ReplayError(f"trajectory id must be a stored one, got {id!r}. See: agentloop replay ls")
        return [self.whole[id] for id in ids]


def load(connection: sa.Connection, ids: Sequence[str], *, with_messages: bool = True) -> Loaded:
    """Read rows and compare their checksums. Corrupt rows are named, not returned.

    Training reads no messages: they are for people. A row's checksum covers its record and the checksums of the frames
    that hold its tokens.
    """
    loaded = Loaded()
    for chunk in rows.chunked(list(dict.fromkeys(ids))):
        parts = _grouped(connection, _SEGMENTS, chunk, order_by=_SEGMENT_ORDER)
        sessions = _grouped(connection, _NODES, [id for id in chunk if id not in parts], order_by=_NODE_ORDER)
        said: dict[str, Sequence[Any]] | None = None
        if with_messages:
            found = rows_by_key(connection, tuple(messages.c), chunk, key=messages.c.trajectory)
            said = {id: conversation for id, *conversation in found}
        for row in rows_by_key(connection, _RECORDS, chunk, key=trajectories.c.id):
            try:
                stored = parts.get(row[0], ()), sessions.get(row[0], ())
                whole = _whole(row, *stored, said, lambda run: author_table(connection, run))
            except (TypeError, ValueError, ArithmeticError, struct.error) as error:  # BlobError is a ValueError
                loaded.corrupt[row[0]] = str(error) if isinstance(error, BlobError) else "values that nobody wrote"
                continue
            if whole.segments:
                loaded.whole[row[0]] = whole
            else:
                loaded.without_tokens[row[0]], loaded.gone[row[0]] = whole, row[-1]
    known = {*loaded.whole, *loaded.corrupt, *loaded.gone}
    loaded.gone.update(reasons(connection, [id for id in ids if id not in known]))
    return loaded


def _grouped(
    connection: sa.Connection,
    columns: tuple[sa.Column[Any], ...],
    ids: Sequence[str],
    *,
    order_by: tuple[sa.Column[Any], ...],
) -> dict[str, list[tuple[Any, ...]]]:
    """The values of `columns` after the first, by the first, which is the trajectory's id."""
    found: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for id, *part in rows_by_key(connection, columns, ids, key=columns[0], order_by=order_by):
        found[id].append(tuple(part))
    return found


def _whole(
    row: Sequence[Any],
    segments: Sequence[tuple[Any, ...]],
    nodes: Sequence[tuple[Any, ...]],
    messages_of_rows: Mapping[str, Sequence[Any]] | None,
    authors: Callable[[str], AuthorTable],
) -> Trajectory:
    """Return the trajectory of a row, whose tokens are in `segments` or in `nodes`. `messages_of_rows` is None if
    messages are not wanted. Raises BlobError if the row differs from what was written."""
    *values, checksum, _ = row
    # A person who changes a row on purpose removes its checksum: docs/running-the-buffer.md.
    is_checked = checksum is not None
    if is_checked and rows.record_checksum(values) != checksum:
        raise BlobError("a record of another checksum: it was changed since it was written")
    record = rows.record_of(values)
    said: tuple[Message, ...] = ()
    if messages_of_rows is not None:
        conversation = messages_of_rows.get(record.id)
        said = () if conversation is None else rows.messages_of(*conversation)
        if is_checked and len(said) != (values[_NUM_MESSAGES] or 0):
            raise BlobError(f"{len(said)} messages where {values[_NUM_MESSAGES]} were written")
    blobs = nodes or segments
    if record.state == EVICTED and not blobs:
        return Trajectory(record, (), said)
    session = checked_nodes(rows.nodes_of(nodes, said), with_messages=messages_of_rows is not None)
    parts = segments_of(session, authors(record.run)) if session else tuple(map(rows.segment_of, blobs))
    expected = values[_SEGMENTS_CHECKSUM] if is_checked else None
    if expected is None and content_hash(parts) != record.content_hash:
        raise BlobError("tokens of another content hash")
    if expected is not None and rows.tokens_checksum(blobs) != expected:
        raise BlobError("other segments than were written")
    return Trajectory(record, parts, said, session)


def quarantine(connection: sa.Connection, reasons: Mapping[str, str]) -> None:
    """Set rows aside with their reasons, by id. They are never drawn again, and shown apart."""
    for id, reason in reasons.items():
        set_state(connection, [id], QUARANTINED, reason)


def author_table(connection: sa.Connection, run: str) -> AuthorTable:
    """The author table of a run. Raises ReplayError if it differs from what was written."""
    row = connection.execute(sa.select(runs.c.authors, runs.c.authors_hash).where(runs.c.id == run)).one_or_none()
    if row is None:
        raise ReplayError(f"run must be a stored one, got {run!r}. See which rows name it: agentloop replay verify")
    rows.check_authors(run, *row)
    return AuthorTable.from_json(row.authors)


def task_records(connection: sa.Connection, hashes: Sequence[str]) -> dict[str, TaskRecord]:
    found = selected(connection, list(tasks.c), tasks.c.hash, hashes)
    return {row.hash: TaskRecord(row.hash, row.environment, json.loads(row.payload), row.tools) for row in found}
