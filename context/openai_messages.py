"""Reads messages, their calls, and tools in the form of OpenAI's chat interface."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from context.authors import ENV, INITIALIZATION, USER
from context.messages import Message, ToolCall
from context.parse.json_calls import arguments_of
from context.parse.reply import Malformed
from context.templates.chat_template import RenderError

_AUTHORS = {"user": USER, "tool": ENV}
_TEXT_PARTS = ("text", "input_text", "output_text")
_TEXTS = ("author", "name", "tool_call_id", "reasoning_content")


def read_message(index: int, row: Any) -> Message:
    """Reads a message in OpenAI's form. Raises RenderError for anything else."""
    where = f"messages[{index}]"
    if not isinstance(row, Mapping) or not isinstance(row.get("role"), str):
        raise RenderError(f"{where} must be an object with a role, got {str(row)[:80]}.")
    role = row["role"]
    texts = {key: _text(f"{where}.{key}", row.get(key)) for key in _TEXTS}
    return Message(
        role,
        _content(f"{where}.content", row.get("content"), result=role == "tool"),
        texts["author"] or _AUTHORS.get(role, INITIALIZATION),
        tuple(_call(f"{where}.tool_calls", call) for call in _list(f"{where}.tool_calls", row.get("tool_calls"))),
        name=texts["name"],
        tool_call_id=texts["tool_call_id"],
        reasoning=texts["reasoning_content"],
    )


def _content(where: str, value: Any, *, result: bool) -> str:
    """A content as text: its text parts are joined, and a tool's result is written as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and not (result and any(_kind(part) is None for part in value)):
        return "".join(_part(f"{where}[{index}]", part) for index, part in enumerate(value))
    if result:
        with suppress(TypeError, ValueError):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    kinds = "text or a JSON value" if result else "text or a list of text parts"
    raise RenderError(f"{where} must be {kinds}, got {str(value)[:80]}.")


def _kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else None


def _part(where: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if isinstance(text, str) and (_kind(part) or "text") in _TEXT_PARTS:
        return text
    raise RenderError(
        f"{where} must be a text part, got {str(part)[:80]}. Images, audio and video are not supported: leave such "
        "messages out."
    )


def check_tools(tools: Sequence[Any]) -> None:
    """Raises RenderError for a schema that is not in OpenAI's form. The outer object may be left out."""
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RenderError(
                f'tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}, got {str(tool)[:80]}.'
            )


def _call(where: str, row: Any) -> ToolCall:
    """Reads a call in OpenAI's form. Its arguments are an object, the JSON text of one, or left out."""
    function = row.get("function", row) if isinstance(row, Mapping) else None
    if not isinstance(row, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RenderError(f"{where} must hold the name of a function, got {str(row)[:80]}.")
    try:
        arguments = arguments_of(function.get("arguments"))
    except Malformed as problem:
        raise RenderError(f"{where} must hold an object of arguments, got {str(row)[:80]} ({problem}).") from None
    return ToolCall(function["name"], arguments, _text(f"{where}.id", row.get("id")))


def _text(where: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RenderError(f"{where} must be text, got {str(value)[:80]}.")
    return value


def _list(where: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise RenderError(f"{where} must be a list, got {str(value)[:80]}.")
    return value
