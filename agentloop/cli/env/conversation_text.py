"""Conversations, tasks and tools as a person reads them in a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from context.messages import Message
from context.visible import visible_lines

_INDENT = "    "


def message_text(message: Message) -> str:
    """`assistant: ...` with its calls below."""
    name = f" {message.name}" if message.name else ""
    said = [message.reasoning and f"(thinking) {message.reasoning}", message.content]
    text = "\n".join(part for part in said if part)
    lines = [f"{message.role}{name}: {_indented(text)}".rstrip()]
    lines += [f"{_INDENT}calls {call.name}({_arguments(call.arguments)})" for call in message.tool_calls]
    return visible_lines("\n".join(lines))


def conversation_text(messages: Sequence[Message]) -> str:
    return "\n".join(map(message_text, messages))


def tool_lines(tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each tool, and one for each of its arguments that is described."""
    for tool in tools:
        function = tool["function"]
        parameters = function["parameters"]
        properties, required = parameters.get("properties", {}), parameters.get("required", ())
        arguments = [
            f"{name}: {_type(schema)}{'' if name in required else ' = ' + json.dumps(schema.get('default'))}"
            for name, schema in properties.items()
        ]
        yield f"{function['name']}({', '.join(arguments)})  {function.get('description', '')}".rstrip()
        yield from (
            f"{_INDENT}{name}: {schema['description']}"
            for name, schema in properties.items()
            if "description" in schema
        )


def _type(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " | ".join(_type(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(json.dumps(choice) for choice in schema["enum"])
    return str(schema.get("type", "any"))


def _arguments(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())


def _indented(text: str) -> str:
    return text.replace("\n", f"\n{_INDENT}")
