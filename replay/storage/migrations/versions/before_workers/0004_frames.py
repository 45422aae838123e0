"""One frame for the arrays of a segment, one text for the messages of a trajectory, and checksums of what has none."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import sqlalchemy as sa
import zstandard
from alembic import op

revision = "0004"
down_revision = "0003"


_BATCH = 200
_HEADER = struct.Struct("<2sBBI")
_OLD = {"token_ids": (1, 4), "authors": (2, 1), "behavior_log_probs": (3, 4), "policy_versions": (4, 4)}
"""Kind of the frame, and bytes per token."""
_NEW = ("token_ids", "behavior_log_probs", "policy_versions", "authors")
_TOKENS = 5
_MESSAGE = ("author", "role", "content", "tool_calls", "name", "tool_call_id", "reasoning")
_RECORD = (
    *("id", "run", "group_id", "task", "iteration", "slot", "member", "attempt", "source", "reward", "success"),
    *("advantage", "stop_reason", "error_kind", "num_turns", "num_tool_calls", "num_tokens", "num_action_tokens"),
    *("policy_version_min", "policy_version_max", "temperature", "top_p", "top_k", "logprobs_mode", "mean_entropy"),
    *("mean_behavior_log_prob", "min_behavior_log_prob", "environment", "environment_version", "content_hash"),
    *("parent", "state"),
)
_REALS = (
    *("reward", "advantage", "temperature", "top_p", "mean_entropy", "mean_behavior_log_prob"),
    "min_behavior_log_prob",
)
_ESCAPE = "\ue000json:"
_NEVER = -1
"""No checksum: what is damaged already is found to be, by whoever reads it."""


def upgrade() -> None:
    connection = op.get_bind()
    op.add_column("trajectories", sa.Column("record_checksum", sa.BigInteger, nullable=True))
    old_segments, old_messages = (_renamed(connection, name) for name in ("segments", "messages"))
    segments = op.create_table(
        "segments",
        sa.Column("trajectory", sa.Text, sa.ForeignKey("trajectories.id"), nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("behavior_context", sa.Text, nullable=False),
        sa.Column("num_tokens", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("trajectory", "position"),
    )
    messages = op.create_table(
        "messages",
        sa.Column("trajectory", sa.Text, sa.ForeignKey("trajectories.id"), nullable=False),
        sa.Column("num_messages", sa.BigInteger, nullable=False),
        sa.Column("said", sa.LargeBinary().with_variant(sa.Text(), "postgresql"), nullable=False),
        sa.Column("checksum", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("trajectory"),
    )
    if connection.dialect.name == "postgresql":
        # Frames are compressed already.
        op.execute("ALTER TABLE segments ALTER COLUMN tokens SET STORAGE EXTERNAL")
    for rows in _records(connection):
        ids = [row["id"] for row in rows]
        tokens = [_segment(row) for row in _of(connection, old_segments, ids)]
        said = [_conversation(id, list(each)) for id, each in groupby(_of(connection, old_messages, ids), _trajectory)]
        _insert(connection, segments, tokens)
        for part in said:
            part["said"] = part["text"] if connection.dialect.name == "postgresql" else part["frame"]
        _insert(connection, messages, said)
        sizes = dict.fromkeys(ids, 0)
        for part in tokens:
            sizes[part["trajectory"]] += len(part["tokens"])
        for part in said:
            sizes[part["trajectory"]] += len(part["frame"])
        for row in rows:
            _finish(connection, row, sizes[row["id"]])
    op.drop_table("segments_0003")
    op.drop_table("messages_0003")


def _renamed(connection: sa.Connection, name: str) -> sa.Table:
    op.rename_table(name, f"{name}_0003")
    if connection.dialect.name == "postgresql":
        # Names of indexes belong to the schema, not to their table.
        op.execute(f"ALTER INDEX {name}_pkey RENAME TO {name}_0003_pkey")
    return sa.Table(f"{name}_0003", sa.MetaData(), autoload_with=connection)


def _records(connection: sa.Connection) -> Iterator[Sequence[sa.RowMapping]]:
    """All of them, a batch at a time."""
    columns: list[sa.ColumnClause[Any]] = [sa.column(name) for name in _RECORD]
    query = sa.select(*columns).select_from(sa.table("trajectories")).order_by(sa.column("id")).limit(_BATCH)
    last = None
    while True:
        page = query if last is None else query.where(sa.column("id") > last)
        rows = connection.execute(page).mappings().all()
        if not rows:
            return
        yield rows
        last = rows[-1]["id"]


def _of(connection: sa.Connection, table: sa.Table, ids: Sequence[str]) -> Sequence[sa.RowMapping]:
    query = sa.select(table).where(table.c.trajectory.in_(ids)).order_by(table.c.trajectory, table.c.position)
    return connection.execute(query).mappings().all()


def _trajectory(row: sa.RowMapping) -> str:
    return str(row["trajectory"])


def _insert(connection: sa.Connection, table: sa.Table, rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        names = [column.name for column in table.c]
        connection.execute(table.insert(), [{name: row[name] for name in names} for row in rows])


def _segment(row: sa.RowMapping) -> dict[str, Any]:
    """A damaged one keeps its old frames, which no reader takes for whole."""
    arrays = {name: _array(row[name], row["num_tokens"], *_OLD[name]) for name in _NEW}
    whole = [array for array in arrays.values() if array is not None]
    if len(whole) == len(_NEW):
        tokens = _HEADER.pack(b"AL", _TOKENS, 1, row["num_tokens"]) + _compressed(b"".join(whole), -1)
    else:
        tokens = b"".join(row[name] for name in _OLD if isinstance(row[name], bytes))
    kept = ("trajectory", "position", "reason", "behavior_context", "num_tokens")
    return {**{name: row[name] for name in kept}, "tokens": tokens}


def _array(blob: Any, count: Any, kind: int, size: int) -> bytes | None:
    """None: not what was written."""
    if not (isinstance(blob, bytes) and isinstance(count, int) and 0 <= count < 1 << 32):
        return None
    if blob[: _HEADER.size] != _HEADER.pack(b"AL", kind, 1, count):
        return None
    frame = blob[_HEADER.size :]
    try:
        if zstandard.frame_content_size(frame) != count * size:
            return None
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError:
        return None


def _conversation(trajectory: str, rows: Sequence[sa.RowMapping]) -> dict[str, Any]:
    """Texts as they are stored, escaped ones included. Anything else among them is told by the checksum."""
    said = [{name: row[name] for name in _MESSAGE if row[name] is not None} for row in rows]
    text = json.dumps(said, ensure_ascii=False, separators=(",", ":"), default=repr)
    whole = all(isinstance(value, str) for message in said for value in message.values())
    return {
        "trajectory": trajectory,
        "num_messages": len(said),
        "text": text,
        "frame": _compressed(text.encode(), 1),
        "checksum": zlib.crc32(text.encode()) if whole else _NEVER,
    }


def _compressed(payload: bytes, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True).compress(payload)


def _finish(connection: sa.Connection, row: sa.RowMapping, num_bytes: int) -> None:
    """The checksum that tells later changes of the record, none for one whose content was forgotten; and its size,
    which for one without content stays what it was."""
    try:
        checksum = _checksum(row)
    except (TypeError, ValueError, OverflowError):
        checksum = _NEVER
    table = sa.table("trajectories", sa.column("id"), sa.column("record_checksum"), sa.column("num_bytes"))
    values = {"record_checksum": checksum if row["content_hash"] else None}
    if num_bytes:
        values["num_bytes"] = num_bytes
    connection.execute(table.update().where(table.c.id == row["id"]).values(values))


def _checksum(row: sa.RowMapping) -> int:
    reals = struct.pack(f"<{len(_REALS)}d", *(math.nan if row[name] is None else row[name] + 0.0 for name in _REALS))
    others = "\x1f".join(str(_plain(row, name)) for name in _RECORD if name not in (*_REALS, "state"))
    return zlib.crc32(others.encode("utf-8", "surrogatepass"), zlib.crc32(reals))


def _plain(row: sa.RowMapping, name: str) -> Any:
    value = row[name]
    if name == "success":
        return bool(value)
    if isinstance(value, str) and value.startswith(_ESCAPE):
        return json.loads(value.removeprefix(_ESCAPE))
    return value
