"""Checksums over a row's content too, an epoch of every run, uses that are replays, and what is left of evicted rows.

What a row is found to be is checked by what was written with it first: what fails is quarantined, never blessed.
"""

from __future__ import annotations

import hashlib
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

revision = "0007"
down_revision = "0006"


_BATCH = 200
_FRAME = struct.Struct("<2sBBI")
_TOKENS = 5
_ARRAYS = {"token_ids": (0, 4), "authors": (12, 1), "behavior_log_probs": (4, 4), "policy_versions": (8, 4)}
"""Where each begins in a frame and its bytes, per token; in the order of content hashes."""
_TOKEN_BYTES = 13
_RECORD = (
    *("id", "run", "group_id", "task", "iteration", "slot", "member", "attempt", "source", "reward", "success"),
    *("advantage", "stop_reason", "error_kind", "num_turns", "num_tool_calls", "num_tokens", "num_action_tokens"),
    *("policy_version_min", "policy_version_max", "temperature", "top_p", "top_k", "logprobs_mode", "mean_entropy"),
    *("mean_behavior_log_prob", "min_behavior_log_prob", "environment", "environment_version", "content_hash"),
    "parent",
)
_FACTS = ("token_hash", "num_bytes", "num_messages", "segments_checksum")
_REALS = (
    *("reward", "advantage", "temperature", "top_p", "mean_entropy", "mean_behavior_log_prob"),
    "min_behavior_log_prob",
)
_TEXTS = (
    *("id", "run", "group_id", "task", "source", "stop_reason", "logprobs_mode", "environment", "environment_version"),
    "content_hash",
)
_OPTIONAL_TEXTS = ("error_kind", "parent", "token_hash")
_ESCAPE = "\ue000json:"


_trajectories = sa.table(
    "trajectories",
    *(sa.column(name) for name in (*_RECORD, *_FACTS, "record_checksum", "state", "state_reason", "changed")),
)


class _Changed(ValueError):
    """What is stored is not what was written."""


_REPLAYED = (
    "SELECT count(*) FROM draws WHERE trajectory = trajectories.id AND state = 'committed' AND stream = 'replay'"
)
_LEFT = (
    "id, group_id, slot, member, attempt, source, reward, success, advantage, num_action_tokens, policy_version_min, "
    "parent"
)
_WITHOUT_CONTENT = (
    "state = 'evicted' AND NOT EXISTS (SELECT 1 FROM segments WHERE trajectory = trajectories.id) "
    "AND NOT EXISTS (SELECT 1 FROM messages WHERE trajectory = trajectories.id)"
)
_REMOVED_TASK = '{"removed":true}'


def upgrade() -> None:
    op.add_column("runs", sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"))
    _check_rows()
    _count_replays()
    _draws_name_no_row()
    _index()
    _reclaim()


def _count_replays() -> None:
    op.execute(f"UPDATE trajectories SET uses = ({_REPLAYED}) WHERE uses > 0")  # noqa: S608  constant text
    op.execute("DELETE FROM buffer_state WHERE name = 'rollbacks'")


def _draws_name_no_row() -> None:
    """Without the reference to `trajectories`, which SQLite can only leave out of a new table."""
    if op.get_context().dialect.name == "postgresql":
        op.drop_constraint("draws_trajectory_fkey", "draws", type_="foreignkey")
        return
    old = sa.Table("draws", sa.MetaData(), autoload_with=op.get_bind(), resolve_fks=False)
    op.rename_table("draws", "draws_before")
    op.drop_index("draws_by_trajectory", "draws_before")
    columns = [
        sa.Column(column.name, column.type, nullable=column.nullable, server_default=column.server_default)
        for column in old.columns
    ]
    op.create_table(
        "draws",
        *columns,
        sa.PrimaryKeyConstraint("run", "iteration", "slot"),
        sa.ForeignKeyConstraint(["run"], ["runs.id"]),
    )
    op.execute("INSERT INTO draws SELECT * FROM draws_before")
    op.drop_table("draws_before")
    op.create_index("draws_by_trajectory", "draws", ["trajectory"])


def _index() -> None:
    """What has changed of one run and of what was imported, live reservations, and a run's groups of a task."""
    op.drop_index("trajectories_by_change", "trajectories")
    op.create_index("trajectories_by_change", "trajectories", ["run", "changed"])
    imported = sa.text("source <> 'self' and source <> 'gateway'")
    op.create_index("imports_by_change", "trajectories", ["changed"], sqlite_where=imported, postgresql_where=imported)
    reserved = sa.text("state = 'reserved'")
    op.create_index("reservations_by_sequence", "draws", ["sequence"], sqlite_where=reserved, postgresql_where=reserved)
    op.create_index("groups_by_run", "groups", ["run", "iteration"])
    op.create_index("groups_by_task", "groups", ["task", "run"])


def _reclaim() -> None:
    """A few numbers are left of rows that had no content any more."""
    op.create_table(
        "reclaimed",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("group_id", sa.Text, sa.ForeignKey("groups.id"), nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("slot", "member", "attempt")),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("reward", sa.Double, nullable=False),
        sa.Column("success", sa.Boolean, nullable=False),
        sa.Column("advantage", sa.Double, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("num_action_tokens", "policy_version_min")),
        sa.Column("parent", sa.Text, nullable=True),
        sa.Column("state_reason", sa.Text, nullable=False),
        sa.Column("changed", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("reclaimed_by_change", "reclaimed", ["changed"])
    op.execute(
        f"INSERT INTO reclaimed SELECT {_LEFT}, coalesce(state_reason, 'evicted'), changed FROM trajectories "  # noqa: S608
        f"WHERE {_WITHOUT_CONTENT}"
    )
    op.execute("DELETE FROM token_scores WHERE trajectory IN (SELECT id FROM reclaimed)")
    op.execute("DELETE FROM trajectories WHERE id IN (SELECT id FROM reclaimed)")
    without_rows = sa.text(
        "UPDATE tasks SET payload = :removed WHERE NOT EXISTS (SELECT 1 FROM trajectories WHERE task = tasks.hash)"
    )
    op.execute(without_rows.bindparams(removed=_REMOVED_TASK))


def _check_rows() -> None:
    op.add_column("trajectories", sa.Column("num_messages", sa.BigInteger, nullable=True))
    op.add_column("trajectories", sa.Column("segments_checksum", sa.BigInteger, nullable=True))
    connection = op.get_bind()
    broken: dict[str, str] = {}
    for rows in _records(connection):
        ids = [row["id"] for row in rows]
        segments = _of(connection, "segments", ("reason", "behavior_context", "num_tokens", "tokens"), ids, "position")
        messages = _of(connection, "messages", ("num_messages", "said", "checksum"), ids)
        for row in rows:
            try:
                values = _facts(row, segments.get(row["id"], []), messages.get(row["id"], []))
            except _Changed as error:
                broken[row["id"]] = f"{error}: found by the migration to schema {revision}"
            else:
                connection.execute(_trajectories.update().where(_trajectories.c.id == row["id"]).values(values))
    if broken:
        _quarantine(connection, broken)


def _quarantine(connection: sa.Connection, broken: dict[str, str]) -> None:
    state = sa.table("buffer_state", sa.column("name"), sa.column("value"))
    connection.execute(state.update().where(state.c.name == "changed").values(value=state.c.value + 1))
    newest = sa.select(state.c.value).where(state.c.name == "changed").scalar_subquery()
    for id, reason in broken.items():
        values = {"state": "quarantined", "state_reason": reason, "changed": newest}
        connection.execute(_trajectories.update().where(_trajectories.c.id == id).values(values))


def _records(connection: sa.Connection) -> Iterator[Sequence[sa.RowMapping]]:
    """Rows with a checksum, a batch at a time; those that are quarantined stay what they are."""
    column = _trajectories.c
    query = sa.select(_trajectories).where(column.record_checksum.is_not(None), column.state != "quarantined")
    query = query.order_by(column.id).limit(_BATCH)
    last = None
    while True:
        rows = connection.execute(query if last is None else query.where(column.id > last)).mappings().all()
        if not rows:
            return
        yield rows
        last = rows[-1]["id"]


def _of(
    connection: sa.Connection, name: str, columns: Sequence[str], ids: Sequence[str], *order: str
) -> dict[str, list[Sequence[Any]]]:
    table = sa.table(name, sa.column("trajectory"), *(sa.column(each) for each in (*columns, *order)))
    query = sa.select(table.c.trajectory, *(table.c[each] for each in columns)).where(table.c.trajectory.in_(ids))
    found = connection.execute(query.order_by(table.c.trajectory, *(table.c[each] for each in order)))
    return {id: [row[1:] for row in rows] for id, rows in groupby(found, lambda row: row[0])}


def _facts(row: sa.RowMapping, segments: list[Sequence[Any]], messages: list[Sequence[Any]]) -> dict[str, Any]:
    """The new columns and the checksum over them, of a row that is what was written."""
    plain = {name: _plain(row, name) for name in (*_RECORD, "token_hash", "num_bytes")}
    if _checksum(plain, _RECORD) != row["record_checksum"]:
        raise _Changed("a record of another checksum")
    num_messages = _count(*messages[0]) if messages else 0
    is_gone = row["state"] == "evicted" and not segments
    if not is_gone and _content_hash(segments) != plain["content_hash"]:
        raise _Changed("tokens of another content hash")
    facts = {"num_messages": num_messages, "segments_checksum": None if is_gone else _segments_checksum(segments)}
    return {**facts, "record_checksum": _checksum({**plain, **facts}, (*_RECORD, *_FACTS))}


def _plain(row: sa.RowMapping, name: str) -> Any:
    value = row[name]
    if name == "success" and value in (0, 1):
        return bool(value)
    expected: tuple[type, ...] = (int,)
    if name in (*_TEXTS, *_OPTIONAL_TEXTS):
        expected = (str,)
    elif name in _REALS:
        expected = (int, float)
    may_be_null = name in (*_OPTIONAL_TEXTS, "num_bytes", *_REALS[4:])
    if not (isinstance(value, expected) or (value is None and may_be_null)):
        raise _Changed(f"{value!r} in trajectories.{name}")
    if isinstance(value, str) and value.startswith(_ESCAPE):
        try:
            return str(json.loads(value.removeprefix(_ESCAPE)))
        except ValueError:
            return value
    return value


def _checksum(values: dict[str, Any], names: Sequence[str]) -> int:
    reals = [math.nan if values[name] is None else values[name] + 0.0 for name in _REALS]
    others = "\x1f".join(str(values[name]) for name in names if name not in _REALS)
    return zlib.crc32(others.encode("utf-8", "surrogatepass"), zlib.crc32(struct.pack(f"<{len(reals)}d", *reals)))


def _count(num_messages: Any, said: Any, checksum: Any) -> int:
    try:
        text = said.encode() if isinstance(said, str) else zstandard.ZstdDecompressor().decompress(said)
        count = len(json.loads(text))
    except (TypeError, ValueError, zstandard.ZstdError) as error:
        raise _Changed("messages that can't be read") from error
    if zlib.crc32(text) != checksum or count != num_messages:
        raise _Changed("messages of another checksum, or of another number")
    return count


def _content_hash(segments: list[Sequence[Any]]) -> str:
    digest = hashlib.sha256()
    for reason, behavior_context, num_tokens, tokens in segments:
        arrays = _opened(tokens, num_tokens)
        if not (isinstance(reason, str) and isinstance(behavior_context, str)):
            raise _Changed("segments that can't be read")
        context = "" if behavior_context == "plain" else f"/{behavior_context}"
        name = f"{_text(reason)}{context}".encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<II", len(name), num_tokens) + name)
        for start, size in _ARRAYS.values():
            digest.update(arrays[start * num_tokens : (start + size) * num_tokens])
    return digest.hexdigest()


def _opened(blob: Any, count: Any) -> bytes:
    if not (isinstance(blob, bytes) and isinstance(count, int) and 0 <= count < 1 << 32):
        raise _Changed("tokens that can't be read")
    frame = blob[_FRAME.size :]
    try:
        if blob[: _FRAME.size] != _FRAME.pack(b"AL", _TOKENS, 1, count):
            raise _Changed("tokens with a wrong header")
        if zstandard.frame_content_size(frame) != count * _TOKEN_BYTES:
            raise _Changed("tokens of another number")
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _Changed("tokens in a damaged frame") from error


def _segments_checksum(segments: list[Sequence[Any]]) -> int:
    found = 0
    for reason, behavior_context, num_tokens, tokens in segments:
        text = "\x1f".join((_text(reason), _text(behavior_context), str(num_tokens)))
        found = zlib.crc32(text.encode("utf-8", "surrogatepass") + tokens[-4:], found)
    return found


def _text(value: str) -> str:
    return str(json.loads(value.removeprefix(_ESCAPE))) if value.startswith(_ESCAPE) else value
