"""Tool calls written as JSON: Hermes (Qwen) and Llama 3."""

from __future__ import annotations

import json
import math
from typing import Any

from context.messages import ToolCall
from context.parse.reply import (
    MAX_CHARS,
    MAX_DEPTH,
    NOT_CLOSED,
    TOO_DEEP,
    CallParser,
    Malformed,
    ReadCalls,
    check_length,
    check_tool_name,
    is_unicode,
)


class HermesParser(CallParser):
    """`<tool_call>` {"name": ..., "arguments": {...}} `</tool_call>`, one or more, after optional text."""

    _OPEN = "<tool_call>"
    _CLOSE = "</tool_call>"

    def _read_calls(self, text: str) -> ReadCalls:
        if self._OPEN not in text and self._CLOSE not in text:
            return ReadCalls(text)
        content, *blocks = text.split(self._OPEN)
        check_length(len(text) - len(content))
        if self._CLOSE in content:
            raise Malformed("a tool call is closed that was never opened")
        calls = []
        for block in blocks:
            body, closed, after = block.partition(self._CLOSE)
            if not closed:
                raise Malformed(NOT_CLOSED)
            if after.strip():
                raise Malformed("there is text after a tool call")
            calls.append(_call_from_json(body, ("arguments",)))
        return ReadCalls(content.removesuffix("\n"), tuple(calls))


class Llama3JsonParser(CallParser):
    """The whole reply is {"name": ..., "parameters": {...}}, optionally after `<|python_tag|>`."""

    _TAG = "<|python_tag|>"

    def _read_calls(self, text: str) -> ReadCalls:
        content, body = "", text.lstrip()
        if not body.startswith("{"):
            # Only ahead of the call is the tag a tag: an argument may hold the same text.
            content, tag, body = text.partition(self._TAG)
            if not tag:
                return ReadCalls(text)
        elif '"name"' not in body[:MAX_CHARS]:
            # Other JSON is an answer like any other; a call has a name.
            return ReadCalls(text)
        check_length(len(body))
        return ReadCalls(content, (_call_from_json(body, ("parameters", "arguments")),))


def _call_from_json(text: str, argument_keys: tuple[str, ...]) -> ToolCall:
    value = strict_json(text.strip())
    if not isinstance(value, dict):
        raise Malformed("a tool call is not a JSON object")
    name = check_tool_name(value.get("name"))
    given = [key for key in argument_keys if key in value]
    if len(given) != 1 or not isinstance(value[given[0]], dict):
        raise Malformed(f'"{argument_keys[0]}" of a tool call is not a JSON object')
    return ToolCall(name, value[given[0]])


def strict_json(text: str) -> Any:
    """JSON that every later reader takes the same way: no duplicate keys, NaN, infinity, lone surrogates."""
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise Malformed(f"a tool call is not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise Malformed(TOO_DEEP) from None
    except ValueError:  # int() refuses more than 4,300 digits
        raise Malformed("a tool call holds a number that is too long") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise Malformed(TOO_DEEP)
    if "\\u" in text and not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise Malformed("a tool call holds half a character")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise Malformed("a tool call has the same key twice")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Malformed("a tool call holds a number that is too large")
    return value


def _not_a_number(text: str) -> float:
    raise Malformed(f"a tool call holds {text}, which is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite, parse_constant=_not_a_number)
