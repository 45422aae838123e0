"""Tool calls of Gemma 4: JSON with bare keys and its own quotation marks, which text can't spell."""

from __future__ import annotations

import re
from typing import Any

from context.messages import ToolCall
from context.parse.json_calls import strict_json
from context.parse.reply import (
    MAX_DEPTH,
    NOT_CLOSED,
    THINK,
    TOO_DEEP,
    CallParser,
    Malformed,
    ReadCalls,
    check_length,
    check_tool_name,
)

_MAX_PARTS = 10_000  # bounds the time: each part is a step of Python
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


class GemmaParser(CallParser):
    """`<|tool_call>call:name{key:<|"|>text<|"|>,n:1,list:[true,{a:null}]}<tool_call|>`, one or more, and text.

    Thinking stands in `<|channel>thought` ... `<channel|>`: Gemma 4's chat template, which writes text behind calls, so
    that what stands there belongs to the content. Malformed: a call that is not closed, a value that is neither text in
    the format's quotation marks nor a list, an object, a number, a truth value or null.
    """

    thinking = (("<|channel>thought", "<channel|>"), THINK)
    _OPEN, _CLOSE = "<|tool_call>", "<tool_call|>"
    _HEAD = re.compile(r"\s*call:\s*([^\s{\[<]*)")
    _TAIL = re.compile(r"\s*" + re.escape(_CLOSE))

    def _read_calls(self, text: str) -> ReadCalls:
        start = text.find(self._OPEN)
        if start >= 0:
            check_length(len(text) - start)
        outside, calls, end = [], [], 0
        while (begin := text.find(self._OPEN, end)) >= 0:
            outside.append(text[end:begin])
            call, end = self._call(text, begin + len(self._OPEN))
            calls.append(call)
        outside.append(text[end:])
        if any(self._CLOSE in part for part in outside):
            raise Malformed("a tool call is closed that was never opened")
        return ReadCalls("".join(outside).strip("\n") if calls else text, tuple(calls))

    def _call(self, text: str, start: int) -> tuple[ToolCall, int]:
        head = self._HEAD.match(text, start)
        if head is None:
            raise Malformed('a tool call does not begin with "call:"')
        values = _Values(text, head.end())
        arguments = values.read(MAX_DEPTH)
        if not isinstance(arguments, dict):
            raise Malformed('"arguments" of a tool call is not an object')
        tail = self._TAIL.match(text, values.place)
        if tail is None:
            raise Malformed(NOT_CLOSED)
        return ToolCall(check_tool_name(head[1]), arguments), tail.end()


class _Values:
    """Reads values one after another; `place` is where the next one begins."""

    _QUOTE = '<|"|>'
    _SPACE = re.compile(r"\s*")
    _BARE = re.compile(r"[^\s,:\[\]{}<>]+")
    _KEY = re.compile(r"([^,:\[\]{}<>]*):")

    def __init__(self, text: str, place: int) -> None:
        self._text, self.place, self._parts = text, place, 0

    def read(self, depth: int) -> Any:
        self._parts += 1
        if depth == 0:
            raise Malformed(TOO_DEEP)
        if self._parts > _MAX_PARTS:
            raise Malformed(f"the tool calls have more than {_MAX_PARTS} parts")
        if self._takes("{"):
            return self._object(depth)
        if self._takes("["):
            return self._list(depth)
        return self._quoted() if self._takes(self._QUOTE) else self._bare()

    def _object(self, depth: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        while not self._takes("}"):
            if value and not self._takes(","):
                raise Malformed(NOT_CLOSED)
            key = self._key()
            if key in value:
                raise Malformed("a tool call has the same key twice")
            value[key] = self.read(depth - 1)
        return value

    def _list(self, depth: int) -> list[Any]:
        value: list[Any] = []
        while not self._takes("]"):
            if value and not self._takes(","):
                raise Malformed(NOT_CLOSED)
            value.append(self.read(depth - 1))
        return value

    def _key(self) -> str:
        if self._takes(self._QUOTE):
            key = self._quoted()
            if not self._takes(":"):
                raise Malformed("a key of a tool call has no value")
            return key
        found = self._KEY.match(self._text, self.place)
        if found is None:
            raise Malformed("a key of a tool call has no value")
        self.place = found.end()
        return found[1].strip()

    def _quoted(self) -> str:
        end = self._text.find(self._QUOTE, self.place)
        if end < 0:
            raise Malformed("a text in a tool call is not closed")
        value = self._text[self.place : end]
        self.place = end + len(self._QUOTE)
        return value

    def _bare(self) -> Any:
        found = self._BARE.match(self._text, self.place)
        if found is None:
            raise Malformed("a value of a tool call is missing")
        self.place = found.end()
        return _WORDS[found[0]] if found[0] in _WORDS else strict_json(found[0])

    def _takes(self, mark: str) -> bool:
        """Goes past the mark, if it stands next."""
        spaces = self._SPACE.match(self._text, self.place)
        assert spaces is not None
        taken = self._text.startswith(mark, spaces.end())
        if taken:
            self.place = spaces.end() + len(mark)
        return taken
