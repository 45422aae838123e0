"""Telling a template's own text from the contents it was given.

Contents are swapped for markers (private-use characters and a number) and the template is rendered with
these: what stands between the markers is the template's own text, whatever the contents spell. The rendering
of the real contents is then read along that outline, and has to agree with it to the last character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from context.authors import HISTORY, MEMORY, TEMPLATE
from context.messages import Message, ToolCall, below
from context.parse import NAME
from context.templates.chat_template import RenderError

_BEGIN, _END = "\uf8e0", "\uf8e1"
REPLY = _BEGIN + "reply" + _END
"""Stands for the policy's reply, whose tokens are known and never rendered."""
_ASKED = _BEGIN + "asked" + _END
_MARKER = re.compile(f"{_BEGIN}([0-9]+){_END}")


# Words stay: templates look at them ("type": "object", `arguments.code`), and they spell no control token.
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_.$-]{0,64}")
_PYTHON_ESCAPES = str.maketrans({"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r"})
Piece = str | int
"""Template text, or the number of a slot."""
Row = dict[str, Any]


class Slots:
    """Messages and tools with their contents taken out, and the contents by number.

    White space stays in place: templates ask whether a content is empty, and white space controls nothing.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.authors: list[str] = []
        self.required: dict[int, str] = {}
        """Slots a template must not leave out, with the name of what they hold."""

    def messages(self, messages: Sequence[Message]) -> list[Row]:
        return [self._message(index, message) for index, message in enumerate(messages)]

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[Any]:
        for tool in tools:
            _check_name("tool name", tool.get("function", tool).get("name"))
        return [self._value(tool, TEMPLATE, leaf=self._word) for tool in tools]

    def _message(self, index: int, message: Message) -> Row:
        _check_name(f"messages[{index}].role", message.role)
        row: Row = {"role": message.role}
        if message.reasoning is not None:  # templates may leave out earlier thinking
            row["reasoning_content"] = self._mark(message.reasoning, message.author)
        shown_again = message.author == HISTORY and message.tool_calls
        first = len(self.texts)
        row["content"] = below(self._mark(message.content, message.author), self._mark(message.note, MEMORY))
        if shown_again:  # Llama's templates leave out what was said before a call
            first = len(self.texts)
        if message.tool_calls:
            row["tool_calls"] = [self._call(index, call, message.author) for call in message.tool_calls]
        if message.name is not None:
            row["name"] = _check_name(f"messages[{index}].name", message.name)
        if message.tool_call_id is not None:
            row["tool_call_id"] = _check_name(f"messages[{index}].tool_call_id", message.tool_call_id)
        for slot in range(first, len(self.texts)):
            self.required[slot] = f"messages[{index}] (role {message.role})"
        return row

    def _call(self, index: int, call: ToolCall, author: str) -> Row:
        return _call_row(f"messages[{index}].", call, self._value(call.arguments, author, leaf=self._mark))

    def _mark(self, text: str, author: str) -> str:
        if not text or text.isspace():
            return text
        self.texts.append(text)
        self.authors.append(author)
        return f"{_BEGIN}{len(self.texts) - 1}{_END}"

    def _value(self, value: Any, author: str, *, leaf: Callable[[str, str], str]) -> Any:
        """JSON with its texts taken out: keys but for plain words, all others as `leaf` does it."""
        if isinstance(value, str):
            return leaf(value, author)
        if isinstance(value, Mapping):
            return {self._word(key, author): self._value(child, author, leaf=leaf) for key, child in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._value(child, author, leaf=leaf) for child in value]
        return value

    def _word(self, text: str, author: str) -> str:
        return text if _PLAIN_WORD.fullmatch(text) else self._mark(text, author)


def openings(reply: Message, messages: Sequence[Message]) -> Iterator[list[Row]]:
    """Made-up first turns that what follows a reply can be rendered after, the most faithful first.

    Some templates take tool results only after an assistant message with tool calls, some only after one
    without.
    """
    asked = {"role": "user", "content": _ASKED}
    if reply.tool_calls:
        yield [asked, {"role": "assistant", "content": "", "tool_calls": _marked_calls(reply.tool_calls)}]
    yield [asked, {"role": "assistant", "content": REPLY}]
    answered = [message for message in messages if message.role not in ("user", "system")]
    if answered and not reply.tool_calls:
        calls = [ToolCall(message.name or "tool", {}, message.tool_call_id) for message in answered]
        yield [asked, {"role": "assistant", "content": "", "tool_calls": _marked_calls(calls)}]


def _marked_calls(calls: Sequence[ToolCall]) -> list[Row]:
    return [_call_row("", call, {"reply": REPLY}) for call in calls]


def _call_row(where: str, call: ToolCall, arguments: Any) -> Row:
    name = _check_name(f"{where}tool_calls.name", call.name)
    row: Row = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.id is not None:
        row["id"] = _check_name(f"{where}tool_calls.id", call.id)
    return row


def outline(neutral: str, required: Mapping[int, str]) -> tuple[Piece, ...]:
    """Template text and slots, in turn; begins and ends with template text.

    Every required content has a place: a template that ignores a role would hide its messages.
    """
    parts = _MARKER.split(neutral)
    pieces: list[Piece] = [part if i % 2 == 0 else int(part) for i, part in enumerate(parts)]
    if any(mark in text for text in parts[::2] for mark in (_BEGIN, _END)):
        raise RenderError("chat template must not cut contents apart, got one that does. Use another template.")
    for slot, name in required.items():
        if slot not in pieces:
            raise RenderError(
                f"chat template must render every message, got one that leaves out {name}. "
                "Use a template that knows this role, or give another role."
            )
    return tuple(pieces)


def last_marker(neutral: str) -> str:
    """The marker of the content written last; empty if there is none."""
    found = _MARKER.findall(neutral)
    return f"{_BEGIN}{found[-1]}{_END}" if found else ""


def next_marker(neutral: str, start: int) -> int:
    """Where the first marker at or behind `start` begins; the text's length if there is none."""
    found = _MARKER.search(neutral, start)
    return found.start() if found else len(neutral)


def read_along(real: str, pieces: Sequence[Piece], texts: Sequence[str], start: int) -> list[str]:
    """Cut the real rendering, from `start`, into the texts of `pieces`, which have to concatenate to it."""
    found: list[str] = []
    position = start
    for index, piece in enumerate(pieces):
        following = pieces[index + 1] if index + 1 < len(pieces) else ""
        for form in [piece] if isinstance(piece, str) else _forms(texts[piece]):
            end = position + len(form)
            fits = real.startswith(form, position)
            if fits and (isinstance(following, int) or real.startswith(following, end)):
                break
        else:
            raise RenderError(
                "chat template must write contents as they are, stripped, or as JSON, and the same text "
                f"around every content, got at character {position}: {real[position : position + 40]!r}. "
                "Change the content, or use another template."
            )
        found.append(form)
        position = end
    if position != len(real):
        raise RenderError(f"chat template must end as with any other content, got {real[position:][:40]!r}.")
    return found


def _forms(text: str) -> Iterator[str]:
    """What templates do to contents."""
    ways = [(strip, chars) for chars in (None, "\n") for strip in (str.strip, str.lstrip, str.rstrip)]
    stripped = [text, *(strip(text, chars) for strip, chars in ways)]
    yield from stripped
    for form in stripped:
        yield json.dumps(form, ensure_ascii=False)[1:-1]
    for form in stripped:  # a Python literal, as LFM2 writes arguments
        yield form.translate(_PYTHON_ESCAPES)


def _check_name(field: str, name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{field} must match {NAME.pattern}, got {str(name)[:80]!r}. Rename it.")
    return name
