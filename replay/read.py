"""Taking whole trajectories out, or finding out that they are no longer whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa

from context.messages import Message
from context.tokens import Segment
from replay.blobs import BlobError, content_hash
from replay.change import set_state
from replay.errors import ContentGone, CorruptTrajectory, ReplayError
from replay.records import EVICTED, QUARANTINED, Trajectory, TrajectoryRecord
from replay.rows import RECORD_COLUMNS, SEGMENT_COLUMNS, chunked, message_of, record_of, segment_of
from replay.schema import messages, segments, trajectories


@dataclass(frozen=True)
class Gone:
    """An evicted row without its tokens."""

    trajectory: Trajectory
    reason: str | None


@dataclass
class Loaded:
    """What was found under some ids."""

    whole: dict[str, Trajectory] = field(default_factory=dict)
    corrupt: dict[str, str] = field(default_factory=dict)
    """Reason by id."""
    gone: dict[str, Gone] = field(default_factory=dict)

    def in_order(self, ids: Sequence[str]) -> list[Trajectory]:
        """All of them; raises for the first that is corrupt, evicted or unknown."""
        for id in ids:
            if id in self.gone:
                raise ContentGone(id, self.gone[id].reason)
            if id in self.corrupt:
                raise CorruptTrajectory(id, self.corrupt[id])
            if id not in self.whole:
                raise ReplayError(f"trajectory id must be a stored one, got {id!r}. See: agentloop replay ls")
        return [self.whole[id] for id in ids]


def load(connection: sa.Connection, ids: Sequence[str], *, with_messages: bool = True) -> Loaded:
    """Read and verify; corrupt rows are named, not returned. Messages are for people: training reads none."""
    loaded = Loaded()
    for chunk in chunked(list(dict.fromkeys(ids))):
        talks = _talks(connection, chunk) if with_messages else {}
        _load_chunk(connection, chunk, talks, loaded)
    return loaded


def _talks(connection: sa.Connection, ids: Sequence[str]) -> dict[str, list[Message]]:
    talks: dict[str, list[Message]] = defaultdict(list)
    query = sa.select(messages).where(messages.c.trajectory.in_(ids))
    for said in connection.execute(query.order_by(messages.c.trajectory, messages.c.position)).mappings():
        talks[said["trajectory"]].append(message_of(said))
    return talks


def _load_chunk(
    connection: sa.Connection, ids: Sequence[str], talks: Mapping[str, Sequence[Message]], loaded: Loaded
) -> None:
    query = sa.select(*RECORD_COLUMNS, trajectories.c.state_reason).where(trajectories.c.id.in_(ids))
    records = [(record_of(row), reason) for *row, reason in connection.execute(query)]
    blobs = defaultdict(list)
    parts_of = sa.select(segments.c.trajectory, *SEGMENT_COLUMNS).where(segments.c.trajectory.in_(ids))
    for id, *row in connection.execute(parts_of.order_by(segments.c.trajectory, segments.c.position)):
        blobs[id].append(row)
    for record, reason in records:
        if record.state == EVICTED and record.id not in blobs:
            loaded.gone[record.id] = Gone(Trajectory(record, (), tuple(talks.get(record.id, ()))), reason)
            continue
        try:
            parts = _verified(record, [segment_of(row) for row in blobs[record.id]])
            loaded.whole[record.id] = Trajectory(record, parts, tuple(talks.get(record.id, ())))
        except BlobError as error:
            loaded.corrupt[record.id] = str(error)


def _verified(record: TrajectoryRecord, parts: Sequence[Segment]) -> tuple[Segment, ...]:
    if content_hash(parts) != record.content_hash:
        raise BlobError("tokens of another content hash")
    return tuple(parts)


def quarantine(connection: sa.Connection, reasons: Mapping[str, str]) -> None:
    """Never drawn again, and shown apart with the reason."""
    for id, reason in reasons.items():
        set_state(connection, [id], QUARANTINED, reason)
