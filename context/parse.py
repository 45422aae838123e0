"""Sampled text -> message with tool calls, with an explicit outcome. Nothing the policy writes raises."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from context.authors import LLM
from context.messages import Message, ToolCall

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""What roles and tool names may look like: nothing that could spell a control token."""

Outcome = Literal["final", "tool_calls", "malformed", "truncated"]

_MAX_CHARS = 100_000  # of all tool calls of one reply: bounds the time a parse can take
_MAX_DEPTH = 64  # far below the recursion limit of whoever writes the arguments down later
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_CLOSED = "a tool call is not closed"
_TOO_DEEP = "a tool call is nested too deeply"


@dataclass(frozen=True)
class Reply:
    """One turn of the policy, read."""

    outcome: Outcome
    """final: an answer without tool calls; malformed: it tried to call a tool and could not be understood."""
    message: Message
    """Always there; of a malformed or truncated reply it holds the whole text and no tool calls."""
    problem: str | None
    """Why it is malformed, short, in words the policy can learn from; None otherwise."""


class ReplyParser(Protocol):
    def parse(self, text: str, *, stopped: bool) -> Reply:
        """Read one reply. `text` is without its stop token; `stopped` is False when a length limit cut it."""
        ...


class HermesParser:
    """`<tool_call>` {"name": ..., "arguments": {...}} `</tool_call>`, one or more, after optional text."""

    _OPEN = "<tool_call>"
    _CLOSE = "</tool_call>"

    def parse(self, text: str, *, stopped: bool) -> Reply:
        return _read(text, stopped, self._read_calls)

    def _read_calls(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        if self._OPEN not in text and self._CLOSE not in text:
            return text, ()
        content, *blocks = text.split(self._OPEN)
        _check_length(len(text) - len(content))
        if self._CLOSE in content:
            raise _Malformed("a tool call is closed that was never opened")
        calls = []
        for block in blocks:
            body, closed, after = block.partition(self._CLOSE)
            if not closed:
                raise _Malformed(_NOT_CLOSED)
            if after.strip():
                raise _Malformed("there is text after a tool call")
            calls.append(_call_from_json(body, ("arguments",)))
        return content.removesuffix("\n"), tuple(calls)


class Llama3JsonParser:
    """The whole reply is {"name": ..., "parameters": {...}}, optionally after `<|python_tag|>`."""

    _TAG = "<|python_tag|>"

    def parse(self, text: str, *, stopped: bool) -> Reply:
        return _read(text, stopped, self._read_calls)

    def _read_calls(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        content, body = "", text.lstrip()
        if not body.startswith("{"):
            # Only ahead of the call is the tag a tag: an argument may hold the same text.
            content, tag, body = text.partition(self._TAG)
            if not tag:
                return text, ()
        elif '"name"' not in body[:_MAX_CHARS]:
            # Other JSON is an answer like any other; a call has a name.
            return text, ()
        _check_length(len(body))
        return content, (_call_from_json(body, ("parameters", "arguments")),)


def choose_parser(name: Literal["auto", "hermes", "llama3_json"], template_source: str) -> ReplyParser:
    """The parser of that name; `auto` takes the format in which the chat template writes tool calls."""
    if name == "auto":
        name = "hermes" if "<tool_call>" in template_source else "llama3_json"
    parsers: dict[str, ReplyParser] = {"hermes": HermesParser(), "llama3_json": Llama3JsonParser()}
    if name not in parsers:
        raise ValueError(f"context.parser must be one of auto, {', '.join(parsers)}, got {name!r}.")
    return parsers[name]


class _Malformed(Exception):
    """What is wrong with a tool call, in a few words."""


_ReadCalls = Callable[[str], tuple[str, tuple[ToolCall, ...]]]


def _read(text: str, stopped: bool, read_calls: _ReadCalls) -> Reply:
    if not _is_unicode(text):  # neither a database nor a tokenizer can hold it
        whole = _message(_LONE_SURROGATE.sub("\ufffd", text))
        return Reply("malformed", whole, "the reply is not valid text") if stopped else Reply("truncated", whole, None)
    if not stopped:
        return Reply("truncated", _message(text), None)
    try:
        content, calls = read_calls(text)
    except _Malformed as problem:
        return Reply("malformed", _message(text), str(problem))
    return Reply("tool_calls" if calls else "final", _message(content, calls), None)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _message(content: str, calls: tuple[ToolCall, ...] = ()) -> Message:
    return Message("assistant", content, author=LLM, tool_calls=calls)


def _check_length(chars: int) -> None:
    if chars > _MAX_CHARS:
        raise _Malformed(f"the tool calls are longer than {_MAX_CHARS} characters")


def _call_from_json(text: str, argument_keys: tuple[str, ...]) -> ToolCall:
    value = _strict_json(text.strip())
    if not isinstance(value, dict):
        raise _Malformed("a tool call is not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _Malformed('"name" of a tool call is not the name of a tool')
    given = [key for key in argument_keys if key in value]
    if len(given) != 1 or not isinstance(value[given[0]], dict):
        raise _Malformed(f'"{argument_keys[0]}" of a tool call is not a JSON object')
    return ToolCall(name, value[given[0]])


def _strict_json(text: str) -> Any:
    """JSON that every later reader takes the same way: no duplicate keys, NaN, infinity, lone surrogates."""
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _Malformed(f"a tool call is not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _Malformed(_TOO_DEEP) from None
    except ValueError:  # int() refuses more than 4,300 digits
        raise _Malformed("a tool call holds a number that is too long") from None
    if text.count("[") + text.count("{") > _MAX_DEPTH and _is_deeper(value, _MAX_DEPTH):
        raise _Malformed(_TOO_DEEP)
    if "\\u" in text and not _is_unicode(json.dumps(value, ensure_ascii=False)):
        raise _Malformed("a tool call holds half a character")
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
        raise _Malformed("a tool call has the same key twice")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Malformed("a tool call holds a number that is too large")
    return value


def _not_a_number(text: str) -> float:
    raise _Malformed(f"a tool call holds {text}, which is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite, parse_constant=_not_a_number)
