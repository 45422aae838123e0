"""Replies of GPT-OSS. Each is several messages with a channel, and a call of a tool has a recipient."""

import re
from typing import NamedTuple

from context.messages import ToolCall
from context.parse.json_calls import arguments_of, json_at
from context.parse.reply import NOT_CLOSED, CallParser, Malformed, ReadCalls, check_length, check_tool_name


class _Part(NamedTuple):
    channel: str
    recipient: str | None
    body: int


class HarmonyParser(CallParser):
    """A parser of the harmony format: `<|channel|>analysis<|message|>` thinking `<|end|>`, then a call or an answer.

    A call is `<|start|>assistant to=functions.name<|channel|>commentary json<|message|>{...}<|call|>`. The recipient
    may follow the channel. An answer is `<|channel|>final<|message|>`. Other commentary is text for the user. Source:
    cookbook.openai.com/articles/openai-harmony. Malformed: a header without a message, a call that is not JSON,
    thinking without a call or an answer after it.
    """

    _START = re.compile(r"\s*(?:<\|start\|>\s*assistant)?")
    _HEADER = re.compile(r"([^<]{0,400})(?:<\|channel\|>([^<]{0,400}))?(?:<\|constrain\|>[^<]{0,400})?<\|message\|>")
    _RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
    _CALL_END = re.compile(r"\s*(?:<\|(?:call|end|return)\|>|\Z)")
    _TEXT_END = re.compile(r"<\|(?:call|end|return|start)\|>|\Z")
    _TAG = re.compile(r"<\|(?:start|channel|message|constrain|call)\|>")

    def _read_calls(self, text: str) -> ReadCalls:
        if not self._TAG.search(text) and not self._RECIPIENT.match(text):
            return ReadCalls(text)
        place, end_of_text, calls = 0, len(text.rstrip()), []
        said: dict[str, list[str]] = {"thoughts": [], "content": []}
        answered = False
        while place < end_of_text:
            part = self._part(text, place)
            if part.recipient is not None:
                call, place = self._call(text, part)
                calls.append(call)
                continue
            end = self._TEXT_END.search(text, part.body)
            assert end is not None
            said["thoughts" if part.channel == "analysis" else "content"].append(text[part.body : end.start()])
            answered |= part.channel != "analysis"
            place = end.start() if end[0] == "<|start|>" else end.end()
        if not calls and not answered:
            raise Malformed("the thinking is not followed by an answer")
        thoughts = "\n".join(said["thoughts"]) if said["thoughts"] else None
        return ReadCalls("\n".join(said["content"]), tuple(calls), thoughts)

    def _split_thinking(self, text: str) -> tuple[str | None, str, str | None]:
        """The tags of other families count only in a reply without tags of this one."""
        return (None, text, None) if self._TAG.search(text) else super()._split_thinking(text)

    def _part(self, text: str, place: int) -> _Part:
        start = self._START.match(text, place)
        header = start and self._HEADER.match(text, start.end())
        if not header:
            raise Malformed("a message does not begin with its channel")
        before, channel = header[1], (header[2] or "").split()
        recipient = self._RECIPIENT.search(" ".join([before, *channel]))
        if not channel and recipient is None:
            raise Malformed("a message does not begin with its channel")
        return _Part(channel[0] if channel else "", recipient and recipient[1], header.end())

    def _call(self, text: str, part: _Part) -> tuple[ToolCall, int]:
        check_length(len(text) - part.body)
        value, end = json_at(text, part.body)
        closed = self._CALL_END.match(text, end)
        if closed is None:
            raise Malformed(NOT_CLOSED)
        name = str(part.recipient).removeprefix("functions.")
        return ToolCall(check_tool_name(name), arguments_of(value)), closed.end()
