"""The base of every parser of replies: it splits thinking off, keeps limits, and answers with an outcome."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from context.authors import LLM
from context.messages import Message, ToolCall
from context.wording import storable

NAME = re.compile(r"[A-Za-z0-9_./:-]{1,128}")
"""The form of roles and tool names. It can't spell a control token of brackets."""

Outcome = Literal["final", "tool_calls", "malformed", "truncated", "question"]

MAX_CHARS = 100_000  # in all tool calls of one reply: it bounds the time that a parse can take
MAX_DEPTH = 64  # far below the recursion limit of those who write the arguments down later
NOT_CLOSED = "a tool call is not closed"
TOO_DEEP = "a tool call is nested too deeply"
_SPACE = re.compile(r"\s*")
THINK = ("<think>", "</think>")
"""The tags around thinking in most families."""
Tools = Sequence[Mapping[str, Any]]
"""Tools as chat templates take them: JSON schemas of functions."""


@dataclass(frozen=True)
class Reply:
    outcome: Outcome
    """final: an answer without tool calls. malformed: a call that could not be understood."""
    message: Message
    """The message. A malformed or truncated reply has its whole text, with thinking apart, and no tool calls."""
    problem: str | None
    """Why the reply is malformed, in a few words that the policy can learn from. None: it is not malformed."""


class ReplyParser(Protocol):
    def parse(self, text: str, *, stopped: bool) -> Reply:
        """Reads one reply. `text` is without its stop token. `stopped` is False when a length limit cut the reply."""


class KnownReply:
    """A parser for replies that are known before they become tokens."""

    message: Message

    def parse(self, text: str, *, stopped: bool) -> Reply:
        return Reply("tool_calls" if self.message.tool_calls else "final", self.message, None)


class Malformed(Exception):
    """A tool call can't be read. The message says why, in a few words."""


@dataclass(frozen=True)
class ReadCalls:
    """The parts of a reply behind its thinking."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    thoughts: str | None = None
    """Thinking that is written in the format's own way. None: the format has none."""


class CallParser:
    """The base of parsers of one format of tool calls. All of them share thinking, limits and outcomes."""

    thinking: ClassVar[tuple[tuple[str, str], ...]] = (THINK,)
    """The pairs of tags around this format's thinking, which stands at the beginning."""
    answer_tags: ClassVar[re.Pattern[str] | None] = None
    """The tags that the format writes around answers. They are no part of the answer."""

    def __init__(self, tools: Tools = ()) -> None:
        """`tools`: their schemas tell text from numbers in formats that write arguments as plain text."""
        self._tools = tools

    def _read_calls(self, text: str) -> ReadCalls:
        """Reads the text after the thinking. Raises Malformed, and nothing else."""
        raise NotImplementedError

    def parse(self, text: str, *, stopped: bool) -> Reply:
        if (whole := storable(text)) != text:
            problem = "the reply is not valid text" if stopped else None
            return Reply("malformed" if stopped else "truncated", _message(whole), problem)
        thinking, rest, missing = self._split_thinking(text)
        if not stopped:
            return Reply("truncated", _message(rest, thinking), None)
        if missing:
            return Reply("malformed", _message(rest, thinking), f"the thinking is not closed with {missing}")
        try:
            found = self._read_calls(rest)
        except Malformed as problem:
            return Reply("malformed", _message(rest, thinking), str(problem))
        thoughts = thinking if found.thoughts is None else "\n".join(filter(None, (thinking, found.thoughts)))
        return Reply("tool_calls" if found.calls else "final", _message(found.content, thoughts, found.calls), None)

    def _split_thinking(self, text: str) -> tuple[str | None, str, str | None]:
        """Split off the thinking (None: there is none); return it, the other text, and the closing tag if it is
        missing.

        The opening tag may be missing, because the prompt may contain it.
        """
        body = text.lstrip()
        for opening, closing in self.thinking:
            if body.startswith(opening):
                thinking, closed, rest = body.removeprefix(opening).partition(closing)
                return thinking.strip("\n"), rest.lstrip("\n"), None if closed else closing
        ends = [(body.find(closing), closing) for _, closing in self.thinking if closing in body]
        if not ends or self._only_mentions(text, [closing for _, closing in ends]):
            return None, text, None
        thinking, _, rest = body.partition(min(ends)[1])
        return thinking.strip("\n"), rest.lstrip("\n"), None

    def _only_mentions(self, text: str, tags: Sequence[str]) -> bool:
        """True if tags that end thinking occur only in the arguments of calls, where they end nothing."""
        try:
            found = self._read_calls(text)
        except Malformed:
            return False
        inside = repr([dict(call.arguments) for call in found.calls])
        outside = found.content + (found.thoughts or "")
        return all(tag in inside and tag not in outside for tag in tags)


class BlockParser(CallParser):
    """A parser of text and blocks of calls, each behind a tag. Text behind a block is left out."""

    opening: ClassVar[re.Pattern[str]]
    closing: ClassVar[str | None] = None
    """None: the format has no closing tag, so that a block ends with its last call."""
    closes_only_calls: ClassVar[bool] = True
    """False: the closing tag may stand in a text with calls."""

    def _block(self, text: str, start: int) -> tuple[Sequence[ToolCall], int]:
        """Read the block of calls whose opening tag ends at `start`. Returns its calls, and where it ends."""
        calls: list[ToolCall] = []
        while not text.startswith(str(self.closing), end := skip_space(text, start)):
            call, start = self._call(text, end)
            calls.append(call)
        if not calls:
            raise Malformed("a tool call holds nothing")
        return calls, end + len(str(self.closing))

    def _call(self, text: str, start: int) -> tuple[ToolCall, int]:
        """The call of a block that begins at `start`, and its end."""
        raise NotImplementedError

    def _content(self, around: Sequence[str]) -> str:
        """The content of a reply from the texts before, between and behind its blocks."""
        return around[0] if len(around) == 1 else around[0].removesuffix("\n")

    def _read_calls(self, text: str) -> ReadCalls:
        around: list[str] = []
        calls: list[ToolCall] = []
        end, found = 0, self.opening.search(text)
        if found is not None:
            check_length(len(text) - found.start())
        while found is not None:
            around.append(text[end : found.start()])
            block, end = self._block(text, found.end())
            calls += block
            found = self.opening.search(text, end)
        around.append(text[end:])
        if self.closes_only_calls and self.closing is not None and self.closing in around[0] + around[-1]:
            raise Malformed("a tool call is closed that was never opened")
        return ReadCalls(self._content(around), tuple(calls))


def before_stop(text: str, stop_strings: Sequence[str]) -> str | None:
    """The text before the first of `stop_strings`. None: the text contains no stop string."""
    places = [place for place in map(text.find, stop_strings) if place >= 0]
    return text[: min(places)] if places else None


def _message(content: str, thinking: str | None = None, calls: tuple[ToolCall, ...] = ()) -> Message:
    return Message("assistant", content, author=LLM, tool_calls=calls, reasoning=thinking)


def skip_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    assert found is not None
    return found.end()


def check_length(chars: int) -> None:
    if chars > MAX_CHARS:
        raise Malformed(f"the tool calls are longer than {MAX_CHARS} characters")


def check_tool_name(name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise Malformed('"name" of a tool call is not the name of a tool')
    return name


def check_id(text: str) -> str:
    """The id, in the form of a name: ids come back in later prompts, as names do."""
    if not NAME.fullmatch(text):
        raise Malformed("the id of a tool call is not a plain word")
    return text
