"""Conversations as a person reads them in a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from context.visible import visible_lines

_INDENT = "    "


def conversation_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """`plain_message`s, each as `assistant: ...` with its calls below."""
    return "\n".join(map(_message_text, messages))


def _message_text(message: Mapping[str, Any]) -> str:
    name = f" {message['name']}" if message["name"] else ""
    said = [message["reasoning"] and f"(thinking) {message['reasoning']}", message["content"], message["note"]]
    text = "\n".join(part for part in said if part)
    lines = [f"{message['role']}{name}: {_indented(text)}".rstrip()]
    lines += [f"{_INDENT}calls {call['name']}({_arguments(call['arguments'])})" for call in message["tool_calls"]]
    return visible_lines("\n".join(lines))


def _arguments(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())


def _indented(text: str) -> str:
    return text.replace("\n", f"\n{_INDENT}")
