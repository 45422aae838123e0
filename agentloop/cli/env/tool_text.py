"""Tools as a person reads them in a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_INDENT = "    "


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
