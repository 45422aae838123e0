"""Conversations as people keep them: a JSON file of messages, with tools or without."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from context.authors import ENV, INITIALIZATION, USER
from context.messages import Message, ToolCall
from context.templates.chat_template import RenderError

_AUTHORS = {"user": USER, "tool": ENV}


def read_conversation(path: Path) -> tuple[list[Message], list[dict[str, Any]]]:
    """Messages and tools of a file that holds a list of messages, or {"messages": [...], "tools": [...]}."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RenderError(f"FILE must be JSON, got {str(path)!r} ({error}). Mend the file.") from None
    whole = value if isinstance(value, dict) else {"messages": value}
    rows, tools = whole.get("messages"), whole.get("tools") or []
    if not isinstance(rows, list) or not rows or not isinstance(tools, list):
        raise RenderError(
            f'FILE must hold a list of messages, or {{"messages": [...], "tools": [...]}}, got {str(path)!r}.'
        )
    return [read_message(index, row) for index, row in enumerate(rows)], tools


def read_message(index: int, row: Any) -> Message:
    """A message in OpenAI's form; raises RenderError for what is none."""
    where = f"messages[{index}]"
    if not isinstance(row, Mapping) or not isinstance(row.get("role"), str):
        raise RenderError(f"{where} must be an object with a role, got {str(row)[:80]}.")
    content = row.get("content")
    if content is not None and not isinstance(content, str):
        raise RenderError(f"{where}.content must be text, got {str(content)[:80]}. Join its parts.")
    return Message(
        row["role"],
        content or "",
        row.get("author") or _AUTHORS.get(row["role"], INITIALIZATION),
        tuple(_call(f"{where}.tool_calls", call) for call in row.get("tool_calls") or ()),
        name=row.get("name"),
        tool_call_id=row.get("tool_call_id"),
        reasoning=row.get("reasoning_content"),
    )


def _call(where: str, row: Any) -> ToolCall:
    """A call in OpenAI's form; its arguments as an object, or as the text of one."""
    function = row.get("function", row) if isinstance(row, Mapping) else None
    arguments = function.get("arguments", {}) if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = None
    if not isinstance(function, Mapping) or not isinstance(arguments, dict):
        raise RenderError(f"{where} must hold a name and an object of arguments, got {str(row)[:80]}.")
    return ToolCall(str(function.get("name")), arguments, row.get("id"))
