"""Gemma 4's tool calls: its own notation of an object behind a tag, with texts in quotation marks that are tokens."""

import json
import re
from collections.abc import Sequence

from context.messages import ToolCall
from context.parse.json_calls import strict_json
from context.parse.reply import NOT_CLOSED, THINK, BlockParser, Malformed, check_tool_name

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class GemmaParser(BlockParser):
    """`<|tool_call>call:name{key:<|"|>text<|"|>,n:1,list:[true,{a:null}]}<tool_call|>`, one or more, and text.

    Thinking stands in `<|channel>thought` ... `<channel|>`: Gemma 4's chat template, which writes text behind calls, so
    that what stands there belongs to the content. Malformed: a call that is not closed, and one that is not JSON once
    keys and texts have JSON's quotation marks.
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
