"""Taking whole trajectories out, or finding out that they are no longer whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import sqlalchemy as sa

from context.messages import Message
from context.tokens import BehaviorContext, Segment
from replay.blobs import BlobError, content_hash
from replay.change import set_state
from replay.conversation import messages_of
from replay.errors import ContentGone, CorruptTrajectory, ReplayError
from replay.prepared import rows_by_key
from replay.reclaimed import reasons
from replay.records import EVICTED, QUARANTINED, Trajectory, TrajectoryRecord
from replay.rows import RECORD_COLUMNS, SEGMENT_COLUMNS, chunked, record_checksum, record_of, segment_of
from replay.schema import messages, segments, trajectories

_RECORDS = (*RECORD_COLUMNS, trajectories.c.record_checksum, trajectories.c.state_reason)
_SEGMENTS = (segments.c.trajectory, *SEGMENT_COLUMNS)
_SEGMENT_ORDER = (segments.c.trajectory, segments.c.position)
_CONTEXTS = get_args(BehaviorContext)


@dataclass(frozen=True)
class Gone:
    """A row that was stored without its tokens, for its messages were changed."""

    trajectory: Trajectory
    reason: str | None


@dataclass
class Loaded:
    """What was found under some ids."""

    whole: dict[str, Trajectory] = field(default_factory=dict)
    corrupt: dict[str, str] = field(default_factory=dict)
    """Reason by id."""
    gone: dict[str, Gone] = field(default_factory=dict)
    reclaimed: dict[str, str] = field(default_factory=dict)
    """Why it was evicted, by id, of rows of which only a few numbers are left."""

    def in_order(self, ids: Sequence[str]) -> list[Trajectory]:
        """All of them; raises for the first that is corrupt, evicted or unknown."""
        for id in ids:
            if id in self.gone:
                raise ContentGone(id, self.gone[id].reason)
            if id in self.reclaimed:
                raise ContentGone(id, self.reclaimed[id])
            if id in self.corrupt:
                raise CorruptTrajectory(id, self.corrupt[id])
            if id not in self.whole:
                raise ReplayError(f"trajectory id must be a stored one, got {id!r}. See: agentloop replay ls")
        return [self.whole[id] for id in ids]


def load(connection: sa.Connection, ids: Sequence[str], *, with_messages: bool = True, by_hash: bool = True) -> Loaded:
    """Read and verify; corrupt rows are named, not returned. Messages are for people: training reads none.

    by_hash: the sha256 over all tokens must be that of the record. Without it every array is still checked, by the
    checksum of its frame, its header and its length, which no changed bit gets past; what the hash alone would tell is
    whole arrays that belong to another row.
    """
    loaded = Loaded()
    for chunk in chunked(list(dict.fromkeys(ids))):
        talks, unreadable = _talks(connection, chunk) if with_messages else ({}, {})
        _load_chunk(connection, chunk, talks, loaded, verify=_by_hash if by_hash else _by_length)
        loaded.corrupt |= unreadable
        for id in unreadable:
            loaded.whole.pop(id, None)
    found = {*loaded.whole, *loaded.corrupt, *loaded.gone}
    loaded.reclaimed = reasons(connection, [id for id in ids if id not in found])
    return loaded


def _talks(connection: sa.Connection, ids: Sequence[str]) -> tuple[dict[str, tuple[Message, ...]], dict[str, str]]:
    """Messages by trajectory, and why those of some can't be read."""
    talks: dict[str, tuple[Message, ...]] = {}
    unreadable: dict[str, str] = {}
    for id, *said in rows_by_key(connection, tuple(messages.c), ids, key=messages.c.trajectory):
        try:
            talks[id] = messages_of(*said)
        except BlobError as error:
            unreadable[id] = str(error)
    return talks, unreadable


def _load_chunk(
    connection: sa.Connection,
    ids: Sequence[str],
    talks: Mapping[str, tuple[Message, ...]],
    loaded: Loaded,
    *,
    verify: Callable[[TrajectoryRecord, Sequence[Segment]], None],
) -> None:
    found = rows_by_key(connection, _RECORDS, ids, key=trajectories.c.id)
    blobs = defaultdict(list)
    parts_of = rows_by_key(connection, _SEGMENTS, ids, key=segments.c.trajectory, order_by=_SEGMENT_ORDER)
    for id, *row in parts_of:
        blobs[id].append(row)
    for *values, checksum, reason in found:
        record = record_of(values)
        said = talks.get(record.id, ())
        try:
            # Rows from before there were checksums, and rows without content any more, have none.
            if checksum is not None and checksum != _checksum(values):
                raise BlobError("a record of another checksum: it was changed since it was written")
            if record.state == EVICTED and record.id not in blobs:
                loaded.gone[record.id] = Gone(Trajectory(record, (), said), reason)
                continue
            parts = tuple(segment_of(row) for row in blobs[record.id])
            verify(record, parts)
            loaded.whole[record.id] = Trajectory(record, parts, said)
        except BlobError as error:
            loaded.corrupt[record.id] = str(error)


def _checksum(values: Sequence[Any]) -> int | None:
    """None: they can't have been written."""
    try:
        return record_checksum(values)
    except (TypeError, OverflowError):
        return None


def _by_hash(record: TrajectoryRecord, parts: Sequence[Segment]) -> None:
    if content_hash(parts) != record.content_hash:
        raise BlobError("tokens of another content hash")


def _by_length(record: TrajectoryRecord, parts: Sequence[Segment]) -> None:
    if sum(len(part.tokens) for part in parts) != record.num_tokens:
        raise BlobError("another number of tokens than were written")
    for part in parts:
        if part.behavior_context not in _CONTEXTS:
            raise BlobError(f"an unknown behavior context {part.behavior_context!r}")


def quarantine(connection: sa.Connection, reasons: Mapping[str, str]) -> None:
    """Never drawn again, and shown apart with the reason."""
    for id, reason in reasons.items():
        set_state(connection, [id], QUARANTINED, reason)
