"""Messages for people and for chat templates; their canonical JSON and content hash."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    id: str | None = None
    """None: the model's format has no ids."""


@dataclass(frozen=True)
class Message:
    role: str
    """As the chat template knows it: system, user, assistant, tool, ..."""
    content: str
    author: str = "user"
    """A name of the run's author table."""
    tool_calls: tuple[ToolCall, ...] = field(default=())
    name: str | None = None
    """The tool that answered; None for other roles."""
    tool_call_id: str | None = None
    reasoning: str | None = None
    """The thinking before `content`, for templates that write it apart; None: there was none."""
    note: str = ""
    """What a strategy put below `content`, in the same message: its tokens carry author `memory`."""


def to_template(message: Message) -> dict[str, Any]:
    """The dictionary a Hugging Face chat template expects."""
    row: dict[str, Any] = {"role": message.role, "content": below(message.content, message.note)}
    if message.tool_calls:
        row["tool_calls"] = [_call_to_template(call) for call in message.tool_calls]
    if message.name is not None:
        row["name"] = message.name
    if message.tool_call_id is not None:
        row["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        row["reasoning_content"] = message.reasoning
    return row


def plain_message(message: Message) -> dict[str, Any]:
    """The dictionary that pages and answers for programs have: JSON, whatever a model wrote."""
    calls = [{**vars(call), "arguments": _plain(dict(call.arguments))} for call in message.tool_calls]
    return {**vars(message), "tool_calls": calls}


def _plain(value: Any) -> Any:
    """Models write NaN and Infinity where numbers belong; JSON has neither."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def below(content: str, note: str) -> str:
    """A message's content with its note."""
    return f"{content}\n\n{note}" if note and content else content or note


def _call_to_template(call: ToolCall) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
    if call.id is not None:
        row["id"] = call.id
    return row


def canonical_json(value: Any) -> str:
    """One text per value: sorted keys, no spaces, no NaN. The input of every content hash."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def content_hash(value: Any) -> str:
    """sha256 of the canonical JSON. Lone surrogates hash as themselves."""
    return hashlib.sha256(canonical_json(value).encode("utf-8", "surrogatepass")).hexdigest()


def messages_hash(messages: Sequence[Message]) -> str:
    """Content hash of a conversation, as the template sees it."""
    return content_hash([to_template(message) for message in messages])
