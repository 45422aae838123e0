"""Tool calls as the name of a tool and its arguments in JSON, each behind a tag or a label of its own."""

import json
import re
from collections.abc import Sequence
from typing import ClassVar

from context.messages import ToolCall
from context.parse.json_calls import arguments_of, calls_of, json_at, strict_json
from context.parse.reply import (
    NOT_CLOSED,
    THINK,
    BlockParser,
    CallParser,
    Malformed,
    ReadCalls,
    check_id,
    check_length,
    check_tool_name,
    skip_space,
)

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class SectionParser(BlockParser):
    """A parser of sections of calls. A call is a tag, a name, a tag, JSON arguments, and a tag.

    Malformed: an unknown order of tags, a section or call that is not closed, arguments that are no JSON object.
    """

    call_opening: ClassVar[str]
    heading: ClassVar[re.Pattern[str]]
    """The text from the call's tag to its arguments; group 1 has the name."""
    ending: ClassVar[re.Pattern[str]]
    """The text from the end of the arguments to that of the call."""

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
        """Return the tool's name and the call's id."""
        return text, None


class DeepSeekParser(SectionParser):
    """A parser of DeepSeek's calls, as the models' chat templates write them.

    A call is `function<｜tool▁sep｜>name` and fenced JSON (V3, R1), or `name<｜tool▁sep｜>` and JSON (V3.1). It is
    between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`. All calls together are between tags with `calls`.
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
    ... `[/THINK]` (Magistral). Source: mistral-common's tokenizers. Malformed: no JSON, a call without a name.
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


class GemmaParser(BlockParser):
    """`<|tool_call>call:name{key:<|"|>text<|"|>,n:1,list:[true,{a:null}]}<tool_call|>`, one or more, and text.

    Source: Gemma 4's chat template. Thinking stands in `<|channel>thought` ... `<channel|>`. The template writes text
    behind calls, so that it belongs to the content. Malformed: a call that is not closed, or is not JSON once keys and
    texts have JSON's quotation marks.
    """

    thinking = (("<|channel>thought", "<channel|>"), THINK)
    opening, closing = re.compile(r"<\|tool_call>"), "<tool_call|>"
    _HEAD = re.compile(r"\s*call:\s*([^\s{\[<]*)")
    _PART = re.compile(r'<\|"\|>(.*?)<\|"\|>|([^\s,:\[\]{}<>][^,:\[\]{}<>]*)|<tool_call\|>', re.DOTALL)

    def _block(self, text: str, start: int) -> tuple[Sequence[ToolCall], int]:
        head = self._HEAD.match(text, start)
        if head is None:
            raise Malformed('a tool call does not begin with "call:"')
        written, end = "", head.end()
        for part in self._PART.finditer(text, end):
            written += text[end : part.start()]
            end = part.end()
            if part[0] == self.closing:
                break
            written += _gemma_as_json(part, is_key=text.startswith(":", end))
        else:
            raise Malformed(NOT_CLOSED)
        arguments = strict_json(written)
        if not isinstance(arguments, dict):
            raise Malformed('"arguments" of a tool call is not an object')
        return [ToolCall(check_tool_name(head[1]), arguments)], end

    def _content(self, around: Sequence[str]) -> str:
        return around[0] if len(around) == 1 else "".join(around).strip("\n")


def _gemma_as_json(part: re.Match[str], *, is_key: bool) -> str:
    """A text in Gemma's quotation marks, a bare key or a bare value, as JSON writes it."""
    if part[1] is not None:
        return json.dumps(part[1], ensure_ascii=False)
    word = part[2].strip()
    return json.dumps(word, ensure_ascii=False) if is_key else _PYTHON_WORDS.get(word, word)


class ReactParser(CallParser):
    """Lines that begin with `Action:` and `Action Input:` (a JSON object), or with `Final Answer:`.

    Plain text, for models without a format of their own: ReAct, https://arxiv.org/abs/2210.03629. The text before the
    final answer is thinking. A reply without any of these lines is an answer as a whole. Text behind the JSON is left
    out.
    """

    stop_strings = ("Observation:",)
    """The environment writes these texts, and a policy would go on with them."""
    _LABEL = re.compile(r"^[ \t]*(Action Input|Action|Final Answer|Observation)[ \t]*:[ \t]*", re.MULTILINE)

    def _read_calls(self, text: str) -> ReadCalls:
        found = self._LABEL.search(text)
        if found is None:
            return ReadCalls(text)
        before = text[: found.start()].removesuffix("\n")
        if found[1] == "Final Answer":
            return ReadCalls(text[found.end() :].strip(), thoughts=before or None)
        check_length(len(text) - found.start())
        _, *parts = self._LABEL.split(text)
        return ReadCalls(before, tuple(_labelled_calls(parts[::2], parts[1::2])))


def _labelled_calls(labels: list[str], bodies: list[str]) -> list[ToolCall]:
    if "Observation" in labels:
        raise Malformed('"Observation:" is not for the policy to write')
    if "Final Answer" in labels:
        raise Malformed("there is a final answer after a tool call")
    if labels != ["Action", "Action Input"] * (len(labels) // 2):
        raise Malformed('"Action:" and "Action Input:" must take turns')
    calls = []
    for name, text in zip(bodies[::2], bodies[1::2], strict=True):
        arguments, _ = json_at(text, 0)
        if not isinstance(arguments, dict):
            raise Malformed('"Action Input:" is not a JSON object')
        calls.append(ToolCall(check_tool_name(name.strip()), arguments))
    return calls
