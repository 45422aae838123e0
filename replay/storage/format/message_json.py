"""What was said in a trajectory, at rest: all its messages as one JSON text with a checksum.

A text no database can hold as it is (see `column_types.to_storable`) stands in the JSON as it would in a column, so
that every value in it can be searched by SQL.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence

from context.messages import Message, ToolCall
from replay.storage.format.column_types import from_storable, is_storable, to_storable
from replay.storage.format.encoding import BlobError, compress_text, decompress_text
from replay.storage.format.rows import Row

_OPTIONAL = ("name", "tool_call_id", "reasoning")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def conversation_row(trajectory: str, messages: Sequence[Message], *, compressed: bool) -> tuple[Row, int]:
    """A row of the table `messages`, compressed where the database does not do it by itself, and the bytes it takes."""
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
    """From a row of the table; raises BlobError where it is not what was written."""
    text = plain_text(said)
    if zlib.crc32(text.encode()) != checksum:
        raise BlobError("messages of another checksum")
    try:
        found = tuple(_message(row) for row in json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise BlobError(f"messages that can't be read ({error!r})") from error
    if len(found) != num_messages:
        raise BlobError("another number of messages than were written")
    return found


def plain_text(said: bytes | str) -> str:
    """The JSON, however it is stored; raises BlobError for a damaged frame."""
    return said if isinstance(said, str) else decompress_text(said)


def to_text(messages: Sequence[Message]) -> str:
    rows = [_row(message) for message in messages]
    if not is_storable("".join(value for row in rows for value in row.values())):
        rows = [{name: str(to_storable(value)) for name, value in row.items()} for row in rows]
    return _encode(rows)


def _row(message: Message) -> dict[str, str]:
    row = {"author": message.author, "role": message.role, "content": message.content}
    if message.tool_calls:
        # A text of its own, with the name of each call first: a search compares it as it was written.
        calls = [{"name": c.name, "arguments": dict(c.arguments), "id": c.id} for c in message.tool_calls]
        row["tool_calls"] = json.dumps(calls, separators=(",", ":"))
    for name in _OPTIONAL:
        value = getattr(message, name)
        if value is not None:
            row[name] = value
    if message.note:
        row["note"] = message.note
    return row


def _message(row: Mapping[str, str]) -> Message:
    values = {name: from_storable(value) for name, value in row.items()}
    calls = values.pop("tool_calls", None)
    return Message(**{**values, "tool_calls": tuple(ToolCall(**call) for call in json.loads(calls or "[]"))})  # type: ignore[arg-type]
