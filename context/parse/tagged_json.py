"""Tool calls as JSON behind a tag or a label, one object for each or a list. Most families write them so."""

import re
from collections.abc import Sequence

from context.messages import ToolCall
from context.parse.json_calls import calls_of, json_at
from context.parse.reply import (
    MAX_CHARS,
    NOT_CLOSED,
    THINK,
    BlockParser,
    CallParser,
    Malformed,
    ReadCalls,
    check_length,
    skip_space,
)


class TaggedJsonParser(BlockParser):
    """A parser of JSON between tags: an object for each call, or a list of objects.

    Malformed: a tag that is not closed or was never opened, text that is not JSON (`strict_json`), a call without a
    name, arguments that are no object.
    """

    def _block(self, text: str, start: int) -> tuple[Sequence[ToolCall], int]:
        if self.closing is None:
            value, end = json_at(text, start)
            return calls_of(value), end
        if text.find(self.closing, start) < 0:
            raise Malformed(NOT_CLOSED)
        value, end = json_at(text, start)
        end = skip_space(text, end)
        if not text.startswith(self.closing, end):
            raise Malformed(f"a tool call is not valid JSON: Extra data at character {end - skip_space(text, start)}")
        return calls_of(value), end + len(self.closing)


class HermesParser(TaggedJsonParser):
    """`<tool_call>` {"name": ..., "arguments": {...}} `</tool_call>`.

    Hermes 2 and 3, Qwen 2.5 and 3, Granite 4, EXAONE 4 and others: github.com/NousResearch/Hermes-Function-Calling.
    """

    opening, closing = re.compile("<tool_call>"), "</tool_call>"


class PhiParser(TaggedJsonParser):
    """`<|tool_call|>` [{"name": ..., "arguments": {...}}] `<|/tool_call|>`: Phi-4-mini's model card."""

    opening, closing = re.compile(r"<\|tool_call\|>"), "<|/tool_call|>"


class GraniteParser(TaggedJsonParser):
    """`<|tool_call|>` [{"name": ..., "arguments": {...}}], up to the end of the turn: Granite 3's chat template."""

    opening = re.compile(r"<\|tool_call\|>")


class NemotronParser(TaggedJsonParser):
    """`<TOOLCALL>` [{"name": ..., "arguments": {...}}] `</TOOLCALL>`: chat template of Nemotron Nano 2, Super 1.5."""

    opening, closing = re.compile("<TOOLCALL>"), "</TOOLCALL>"


class JambaParser(TaggedJsonParser):
    """`<tool_calls>` [{"name": ..., "arguments": {...}}] `</tool_calls>`: chat templates of Jamba and Hunyuan A13B.

    Hunyuan begins an answer with its own name where it has tools.
    """

    opening, closing = re.compile("<tool_calls>"), "</tool_calls>"

    def _content(self, around: Sequence[str]) -> str:
        return super()._content(around).removeprefix("助手：")


class CommandRParser(TaggedJsonParser):
    """`Action:` and a fenced JSON list of {"tool_name": ..., "parameters": {...}}: Command R's tool-use template."""

    opening, closing = re.compile(r"Action:\s*```(?:json)?(?=\s)"), "```"
    closes_only_calls = False


class CommandAParser(TaggedJsonParser):
    """`<|START_ACTION|>` [{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}] `<|END_ACTION|>`.

    Plans stand in `<|START_THINKING|>` ... `<|END_THINKING|>`, answers in `<|START_RESPONSE|>` ...
    `<|END_RESPONSE|>` (or TEXT): chat templates of Command R7B and Command A.
    """

    thinking = (("<|START_THINKING|>", "<|END_THINKING|>"), THINK)
    opening, closing = re.compile(r"<\|START_ACTION\|>"), "<|END_ACTION|>"
    answer_tags = re.compile(r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>")

    def _content(self, around: Sequence[str]) -> str:
        return self.answer_tags.sub("", super()._content(around))


class Llama3JsonParser(CallParser):
    """The whole reply is {"name": ..., "parameters": {...}}, or several, with or without `;` between them.

    Llama 3.1 to 4, optionally behind `<|python_tag|>`. Llama 4 puts its text before a call between `<|python_start|>`
    and `<|python_end|>`. Text behind the calls is left out. Malformed: as for tagged JSON.
    """

    _TAG = re.compile(r"<\|python_tag\|>|<\|python_start\|>")
    _END = "<|python_end|>"
    _BETWEEN = re.compile(r"[\s;,]*(?=\{)")

    def _read_calls(self, text: str) -> ReadCalls:
        content, start = self._place(text)
        if start is None:
            return ReadCalls(content)
        check_length(len(text) - start)
        calls: list[ToolCall] = []
        place: re.Match[str] | None = None
        while not calls or (place := self._BETWEEN.match(text, start)) is not None:
            value, start = json_at(text, place.end() if place else start)
            calls += calls_of(value)
        return ReadCalls(content, tuple(calls))

    def _place(self, text: str) -> tuple[str, int | None]:
        """The text before the calls, and where they begin. None: there are no calls."""
        begin = skip_space(text, 0)
        if text.startswith("{", begin):
            # Other JSON is an answer like any other; a call has a name.
            named = any(text.find(key, begin, begin + MAX_CHARS) >= 0 for key in ('"name"', '"function"'))
            return ("", begin) if named else (text, None)
        # The first tag is the one before the call: an argument may hold its text again.
        tag = self._TAG.search(text)
        if tag is None:
            return text, None
        inside, closed, _ = text[tag.end() :].partition(self._END)
        if closed and not inside.lstrip().startswith("{"):
            behind = skip_space(text, tag.end() + len(inside) + len(closed))
            content = text[: tag.start()] + inside
            return content, behind if text.startswith("{", behind) else None
        return text[: tag.start()], tag.end()
