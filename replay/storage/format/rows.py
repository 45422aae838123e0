"""The conversion between records and table rows. The messages of a trajectory are one JSON text with a checksum. Its
texts are escaped as in a column (`column_types.to_storable`), so that SQL can search every value in it."""

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, TypeVar

import sqlalchemy as sa

from context.messages import Message, ToolCall
from context.tokens.session_nodes import Fork, Node, Place, Status
from context.tokens.token_sequence import Segment
from replay.errors import DamagedDatabase
from replay.records import GroupRecord, RunRecord, TrajectoryRecord
from replay.storage.format.column_types import from_storable, is_storable, to_storable
from replay.storage.format.encoding import (
    FRAME_CHECKSUM_BYTES,
    BlobError,
    compress_text,
    decode_tokens,
    decompress_text,
    encode_tokens,
)
from replay.storage.format.schema import groups, nodes, runs, segments, trajectories

Row = dict[str, Any]
Key = TypeVar("Key")

_MOST_PARAMETERS = 500
LOG_PROB_FIELDS = ("mean_behavior_log_prob", "min_behavior_log_prob")
"""NaN where no token was sampled, NULL in a table."""

_RECORD_FIELDS = [field.name for field in fields(TrajectoryRecord)]
RECORD_COLUMNS = [trajectories.c[name] for name in _RECORD_FIELDS]
_REAL_FIELDS = {column.key for column in RECORD_COLUMNS if isinstance(column.type, sa.Double)}
_reals_of = itemgetter(*(at for at, name in enumerate(_RECORD_FIELDS) if name in _REAL_FIELDS))
_CONTENT = [trajectories.c[name] for name in ("num_bytes", "num_messages", "segments_checksum")]
CHECKED_COLUMNS = [*RECORD_COLUMNS, *_CONTENT]
"""The columns that a row's checksum covers, except the state."""
_CHECKED = [column.key for column in CHECKED_COLUMNS]
checked_of = itemgetter(*_CHECKED)
"""Takes the values of CHECKED_COLUMNS from a row of the table."""
_others_of = itemgetter(*(at for at, name in enumerate(_CHECKED) if name not in {*_REAL_FIELDS, "state"}))
_REALS = struct.Struct(f"<{len(_REAL_FIELDS)}d")
_BETWEEN = "\x1f"
RUN_COLUMNS = [runs.c[field.name] for field in fields(RunRecord)]
GROUP_COLUMNS = [groups.c[field.name] for field in fields(GroupRecord)]
SEGMENT_COLUMNS = [segments.c[name] for name in ("reason", "behavior_context", "num_tokens", "tokens")]
_OPTIONAL_PARTS = ("name", "tool_call_id", "reasoning", "error_kind")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
segment_values = itemgetter(*(column.key for column in SEGMENT_COLUMNS))
NODE_COLUMNS = [column for column in nodes.c if column.key != "trajectory"]
node_values = itemgetter(*(column.key for column in NODE_COLUMNS))


def now() -> str:
    """The time of day, for people. Nothing is ordered by it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def chunked(keys: Sequence[Key]) -> Iterator[Sequence[Key]]:
    """The keys in parts: databases limit the parameters of one statement."""
    for start in range(0, len(keys), _MOST_PARAMETERS):
        yield keys[start : start + _MOST_PARAMETERS]


def known(value: float | None) -> float | None:
    """The value for a column: NaN becomes None, because an unknown number is stored as NULL."""
    return None if value is None or math.isnan(value) else value


def run_of(row: Sequence[Any]) -> RunRecord:
    """The record of a run, from the values of RUN_COLUMNS. Raises DamagedDatabase if its authors were changed."""
    values: dict[str, Any] = dict(zip((column.key for column in RUN_COLUMNS), row, strict=True))
    check_authors(values["id"], values["authors"], values["authors_hash"])
    made = values["fingerprint"]
    values |= {"config": json.loads(values["config"]), "fingerprint": None if made is None else json.loads(made)}
    return RunRecord(**values)


def check_authors(run: str, authors: str, authors_hash: str) -> None:
    """Raises DamagedDatabase if an author table does not match its hash: every mask follows from the table."""
    if hashlib.sha256(str(authors).encode("utf-8", "surrogatepass")).hexdigest() != authors_hash:
        raise DamagedDatabase(f"another table than runs.authors_hash is of in runs.authors of run {run!r}")


def record_of(row: Sequence[Any]) -> TrajectoryRecord:
    """The record of a trajectory, from the values of RECORD_COLUMNS; further values are ignored."""
    values: dict[str, Any] = dict(zip(_RECORD_FIELDS, row, strict=False))
    for name in LOG_PROB_FIELDS:
        if values[name] is None:
            values[name] = math.nan
    return TrajectoryRecord(**values)


def record_checksum(values: Sequence[Any]) -> int:
    """CRC-32 of the values of CHECKED_COLUMNS except the state, which changes. Raises TypeError for other types.

    Reals are normalised first: databases keep neither the sign of a zero nor whether a real was a whole number.
    """
    reals = [math.nan if value is None else value + 0.0 for value in _reals_of(values)]
    others = _BETWEEN.join(map(repr, _others_of(values)))
    return zlib.crc32(others.encode("utf-8", "surrogatepass"), zlib.crc32(_REALS.pack(*reals)))


def tokens_checksum(rows: Iterable[Sequence[Any]]) -> int:
    """CRC-32 of the values of SEGMENT_COLUMNS of a trajectory's segments, in order, or of NODE_COLUMNS of its nodes. It
    covers only the checksum of a tokens' frame, which is compared when the frame is opened."""
    found = 0
    for *facts, tokens in rows:
        text = _BETWEEN.join(map(str, facts))
        found = zlib.crc32(text.encode("utf-8", "surrogatepass") + tokens[-FRAME_CHECKSUM_BYTES:], found)
    return found


def node_checksum(session: str, values: Sequence[Any], said: int) -> int:
    """The checksum of a node of an open session, from the values of NODE_COLUMNS and the checksum `said` of its
    messages. The checksum of the status is added on top, so that SQL can change the status."""
    facts = dict(zip((column.key for column in NODE_COLUMNS), values, strict=True))
    status = facts.pop("status")
    return tokens_checksum([as_read((session, said, *facts.values()))]) + status_checksum(str(status))


def status_checksum(status: str) -> int:
    return zlib.crc32(status.encode("utf-8", "surrogatepass"))


def as_read(values: Iterable[Any]) -> list[Any]:
    """The values as a database returns them: plain texts, with two surrogate halves joined to one character."""
    given = list(values)
    texts = [value for value in given if isinstance(value, str)]
    if all(type(text) is str for text in texts) and is_storable("".join(texts)):
        return given
    return [from_storable(to_storable(str.__str__(value))) if isinstance(value, str) else value for value in given]


def segment_rows(trajectory: str, parts: Sequence[Segment]) -> Iterator[Row]:
    for position, segment in enumerate(parts):
        yield {
            "trajectory": trajectory,
            "position": position,
            "reason": segment.reason,
            "behavior_context": segment.behavior_context,
            "num_tokens": len(segment.tokens),
            "tokens": encode_tokens(segment.tokens),
        }


def segment_of(row: Sequence[Any]) -> Segment:
    """The segment of a row, from the values of SEGMENT_COLUMNS. Raises BlobError for a damaged blob."""
    reason, behavior_context, count, blob = row
    return Segment(decode_tokens(blob, count), reason, behavior_context)


def node_rows(trajectory: str, session: Sequence[Node]) -> Iterator[Row]:
    for node in session:
        yield {
            "trajectory": trajectory,
            "number": node.number,
            **vars(node.place),
            "status": node.status,
            "agent": node.agent,
            "offered": compress_text(node.offered) if node.offered else b"",
            "num_messages": len(node.messages),
            "num_sampled": node.num_sampled,
            "num_tokens": len(node.tokens),
            "tokens": encode_tokens(node.tokens),
        }


def nodes_of(rows: Iterable[Sequence[Any]], messages: Sequence[Message]) -> Iterator[Node]:
    """The nodes of a session, from the values of NODE_COLUMNS and the messages of all nodes. Raises BlobError for a
    damaged blob."""
    start = 0
    for number, parent, kept_tokens, kept_messages, tools, fork, *reply, num_sampled, num_tokens, tokens in rows:
        status, agent, offered, num_messages = reply
        shown = decompress_text(offered) if offered else ""
        where = Place(parent, kept_tokens, kept_messages, tools, None if fork is None else Fork(fork))
        said, start = tuple(messages[start : start + num_messages]), start + num_messages
        yield Node(number, where, decode_tokens(tokens, num_tokens), num_sampled, said, Status(status), agent, shown)


def conversation_row(trajectory: str, messages: Sequence[Message], *, compressed: bool) -> tuple[Row, int]:
    """A row of the table `messages`, and the bytes that it takes. It is `compressed` if the database does not do so."""
    text = to_text(messages)
    frame = compress_text(text)
    row = {
        "trajectory": trajectory,
        "num_messages": len(messages),
        "said": frame if compressed else text,
        "checksum": zlib.crc32(text.encode()),
    }
    return row, len(frame)


def messages_of(num_messages: int, said: bytes | str, checksum: int) -> tuple[Message, ...]:
    """The messages of a row of the table. Raises BlobError for a damaged row."""
    text = plain_text(said)
    if zlib.crc32(text.encode()) != checksum:
        raise BlobError("messages of another checksum")
    try:
        found = tuple(_message_of(row) for row in json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise BlobError(f"messages that can't be read ({error!r})") from error
    if len(found) != num_messages:
        raise BlobError("another number of messages than were written")
    return found


def readable_messages(num_messages: int, said: bytes | str, checksum: int) -> tuple[Message, ...] | None:
    """The messages of a row of the table; None if they are damaged."""
    try:
        return messages_of(num_messages, said, checksum)
    except BlobError:
        return None


def plain_text(said: bytes | str) -> str:
    """The JSON text, stored compressed or not. Raises BlobError for a damaged frame."""
    return said if isinstance(said, str) else decompress_text(said)


def to_text(messages: Sequence[Message]) -> str:
    rows = [_message_row(message) for message in messages]
    if not is_storable("".join(value for row in rows for value in row.values())):
        rows = [{name: str(to_storable(value)) for name, value in row.items()} for row in rows]
    return _encode(rows)


def _message_row(message: Message) -> dict[str, str]:
    row = {"author": message.author, "role": message.role, "content": message.content}
    if message.tool_calls:
        # The calls are a text of their own, with each call's name first, so that a search can match it.
        calls = [{"name": c.name, "arguments": dict(c.arguments), "id": c.id} for c in message.tool_calls]
        row["tool_calls"] = json.dumps(calls, separators=(",", ":"))
    for name in _OPTIONAL_PARTS:
        value = getattr(message, name)
        if value is not None:
            row[name] = value
    if message.note:
        row["note"] = message.note
    if message.reward is not None:
        row["reward"] = repr(float(message.reward))
    return row


def _message_of(row: Mapping[str, str]) -> Message:
    values = {name: from_storable(value) for name, value in row.items()}
    calls, reward = values.pop("tool_calls", None), values.pop("reward", None)
    given = {"tool_calls": tuple(ToolCall(**call) for call in json.loads(calls or "[]"))}
    return Message(**{**values, **given, "reward": None if reward is None else float(reward)})  # type: ignore[arg-type]
