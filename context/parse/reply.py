"""What a parser answers, and what every parser shares: thinking split off, limits, outcomes instead of exceptions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from context.authors import LLM
from context.messages import Message, ToolCall

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""What roles and tool names may look like: nothing that could spell a control token."""

Outcome = Literal["final", "tool_calls", "malformed", "truncated", "question"]

MAX_CHARS = 100_000  # of all tool calls of one reply: bounds the time a parse can take
MAX_DEPTH = 64  # far below the recursion limit of whoever writes the arguments down later
NOT_CLOSED = "a tool call is not closed"
TOO_DEEP = "a tool call is nested too deeply"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_THINK, _END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class Reply:
    """One turn of the policy, read."""

    outcome: Outcome
    """final: an answer without tool calls; malformed: it tried to call a tool and could not be understood."""
    message: Message
    """Always there; of a malformed or truncated reply it holds the whole text (thinking apart) and no tool calls."""
    problem: str | None
    """Why it is malformed, short, in words the policy can learn from; None otherwise."""


class ReplyParser(Protocol):
    def parse(self, text: str, *, stopped: bool) -> Reply:
        """Read one reply. `text` is without its stop token; `stopped` is False when a length limit cut it."""
        ...


class KnownReply:
    """A parser for replies that are known before they become tokens."""

    message: Message

    def parse(self, text: str, *, stopped: bool) -> Reply:
        return Reply("tool_calls" if self.message.tool_calls else "final", self.message, None)


class Malformed(Exception):
    """What is wrong with a tool call, in a few words."""


@dataclass(frozen=True)
class ReadCalls:
    """What stands in a reply beside its thinking."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    thoughts: str | None = None
    """Thinking that is written in the format's own way; None where it has none."""


class CallParser:
    """A parser of one format of tool calls: thinking, limits and outcomes are those of all formats."""

    def _read_calls(self, text: str) -> ReadCalls:
        """What follows the thinking. May raise `Malformed`; nothing else does."""
        raise NotImplementedError

    def parse(self, text: str, *, stopped: bool) -> Reply:
        if not is_unicode(text):  # neither a database nor a tokenizer can hold it
            whole = _message(_LONE_SURROGATE.sub("\ufffd", text))
            return (
                Reply("malformed", whole, "the reply is not valid text") if stopped else Reply("truncated", whole, None)
            )
        thinking, rest, closed = (None, text, True) if self._only_mentions(text) else split_thinking(text)
        if not stopped:
            return Reply("truncated", _message(rest, thinking), None)
        if not closed:
            return Reply("malformed", _message(rest, thinking), f"the thinking is not closed with {_END_THINK}")
        try:
            found = self._read_calls(rest)
        except Malformed as problem:
            return Reply("malformed", _message(rest, thinking), str(problem))
        thoughts = thinking if found.thoughts is None else "\n".join(filter(None, (thinking, found.thoughts)))
        return Reply("tool_calls" if found.calls else "final", _message(found.content, thoughts, found.calls), None)

    def _only_mentions(self, text: str) -> bool:
        """Whether the tag that ends thinking stands within a call's arguments only, where it ends nothing."""
        if _END_THINK not in text or text.lstrip().startswith(_THINK):
            return False
        try:
            found = self._read_calls(text)
        except Malformed:
            return False
        inside = any(_END_THINK in repr(dict(call.arguments)) for call in found.calls)
        return inside and _END_THINK not in found.content + (found.thoughts or "")


def split_thinking(text: str) -> tuple[str | None, str, bool]:
    """Thinking (None: there is none), what follows it, and whether it was closed.

    The opening tag may be missing: many templates write it for the policy.
    """
    body = text.lstrip()
    opened = body.startswith(_THINK)
    thinking, closing, rest = body.removeprefix(_THINK).partition(_END_THINK)
    if closing:
        return thinking.strip("\n"), rest.lstrip("\n"), True
    return (thinking.strip("\n"), "", False) if opened else (None, text, True)


def _message(content: str, thinking: str | None = None, calls: tuple[ToolCall, ...] = ()) -> Message:
    return Message("assistant", content, author=LLM, tool_calls=calls, reasoning=thinking)


def check_length(chars: int) -> None:
    if chars > MAX_CHARS:
        raise Malformed(f"the tool calls are longer than {MAX_CHARS} characters")


def check_tool_name(name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise Malformed('"name" of a tool call is not the name of a tool')
    return name


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
