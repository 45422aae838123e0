"""Tool calls as a tool's name and then its arguments as JSON, each behind tags of its own."""

import re
from collections.abc import Sequence
from typing import ClassVar

from context.messages import ToolCall
from context.parse.json_calls import arguments_of, calls_of, json_at
from context.parse.reply import NOT_CLOSED, THINK, BlockParser, Malformed, check_id, check_tool_name, skip_space


class SectionParser(BlockParser):
    """A parser of sections of calls; in each, one or more: tag, name, tag, JSON arguments, tag.

    Malformed: an unknown order of tags, a section or call that is not closed, what is not a JSON object.
    """

    call_opening: ClassVar[str]
    heading: ClassVar[re.Pattern[str]]
    """From there to where its arguments begin; group 1 has the name."""
    ending: ClassVar[re.Pattern[str]]
    """From the arguments' end to the call's."""

    def _content(self, around: Sequence[str]) -> str:
        if self.call_opening in around[0] + around[-1]:
            raise Malformed("a tool call stands outside of the section of calls")
        return super()._content(around)

    def _call(self, text: str, start: int) -> tuple[ToolCall, int]:
        head = self.heading.match(text, start + len(self.call_opening))
        if head is None or not text.startswith(self.call_opening, start):
            raise Malformed(NOT_CLOSED if start == len(text) else "a tool call does not begin with its tag and a name")
        value, end = json_at(text, head.end())
        tail = self.ending.match(text, end)
        if tail is None:
            raise Malformed(NOT_CLOSED)
        name, call_id = self._named(head[1].strip())
        return ToolCall(check_tool_name(name), arguments_of(value), call_id), tail.end()

    def _named(self, text: str) -> tuple[str, str | None]:
        """The tool's name and the call's id."""
        return text, None


class DeepSeekParser(SectionParser):
    """A call is `function<｜tool▁sep｜>name` and fenced JSON (V3, R1), or `name<｜tool▁sep｜>` and JSON (V3.1).

    Each stands between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`, all of them between tags with `calls`: the
    models' chat templates.
    """

    opening, closing = re.compile("<｜tool▁calls▁begin｜>"), "<｜tool▁calls▁end｜>"
    call_opening = "<｜tool▁call▁begin｜>"
    heading = re.compile(
        r"(?:function<｜tool▁sep｜>(?=[^{\n]*\n\s*```))?"  # V3 names the type of the tool first
        r"([^<{\n]*)(?:<｜tool▁sep｜>|\n\s*```(?:json)?(?=\s))"
    )
    ending = re.compile(r"\s*(?:```\s*)?<｜tool▁call▁end｜>")


class KimiParser(SectionParser):
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>` JSON `<|tool_call_end|>`.

    The whole of `functions.name:0` is the call's id. Several calls stand between `<|tool_calls_section_begin|>` and
    `<|tool_calls_section_end|>`: Kimi K2's guide to tool calls, github.com/MoonshotAI/Kimi-K2.
    """

    opening, closing = re.compile(r"<\|tool_calls_section_begin\|>"), "<|tool_calls_section_end|>"
    call_opening = "<|tool_call_begin|>"
    heading = re.compile(r"([^<]*)<\|tool_call_argument_begin\|>")
    ending = re.compile(r"\s*<\|tool_call_end\|>")
    _ID = re.compile(r"(?:functions\.)?(.+):[0-9]{1,9}")

    def _named(self, text: str) -> tuple[str, str | None]:
        found = self._ID.fullmatch(text)
        if found is None:
            raise Malformed("the id of a tool call is not functions.NAME:INDEX")
        return found[1], check_id(text)


class MistralParser(BlockParser):
    """`[TOOL_CALLS]` and a JSON list (v3), or `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}` for each call (v11, v13).

    The lists hold {"name": ..., "arguments": {...}, "id": ...}; v13 has no `[CALL_ID]`; thinking stands in `[THINK]`
    ... `[/THINK]` (Magistral). Source: mistral-common's tokenizers. Malformed: what is not JSON, a call without a name.
    """

    thinking = (("[THINK]", "[/THINK]"), THINK)
    opening = re.compile(r"\[TOOL_CALLS\]")
    _HEAD = re.compile(r"\s*([^\s\[{]*)\s*(?:\[CALL_ID\]([^\[{]*))?(?:\[ARGS\])?")

    def _block(self, text: str, start: int) -> tuple[Sequence[ToolCall], int]:
        if text.startswith(("[", "{"), skip_space(text, start)):
            value, end = json_at(text, start)
            return calls_of(value), end
        head = self._HEAD.match(text, start)
        assert head is not None
        value, end = json_at(text, head.end())
        call_id = head[2].strip() if head[2] else None
        return [ToolCall(check_tool_name(head[1]), arguments_of(value), call_id and check_id(call_id))], end
