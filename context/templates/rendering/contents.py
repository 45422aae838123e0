"""The texts of messages: as a template is given them, and where it wrote them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from context.authors import MEMORY
from context.messages import Message, ToolCall, below
from context.parse import NAME

_ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function", "observation")
"""What templates write as it is: there are tokenizers for which some of these are control tokens."""
Row = dict[str, Any]
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\n*", re.DOTALL)
Leaf = Callable[[str], str]
"""What becomes of a text before the template gets it."""


@dataclass(frozen=True)
class Content:
    """A text of a message."""

    text: str
    author: str
    required: bool
    """A template that leaves it out hides what was said."""


def contents(message: Message) -> Iterator[Content]:
    """In the order in which `row` gives them to its leaf function; blank ones left out."""
    # Templates may leave out earlier thinking, and what a policy said beside a call.
    found = [
        Content(message.reasoning or "", message.author, False),
        Content(message.content, message.author, not message.tool_calls),
        Content(message.note, MEMORY, True),
    ]
    for call in message.tool_calls:
        found += [Content(text, message.author, True) for text in _texts(call.arguments)]
    return (content for content in found if content.text and not content.text.isspace())


def with_thought(message: Message) -> Message:
    """The message with a thought that opens its content apart from it, as templates that know thoughts take it."""
    found = _THOUGHT.match(message.content) if message.role == "assistant" and message.reasoning is None else None
    if found is None:
        return message
    return replace(message, reasoning=found[1].strip("\n"), content=message.content[found.end() :])


def row(message: Message, leaf: Leaf, word: Leaf) -> Row:
    """The dictionary a Hugging Face chat template expects; `leaf` for each content, `word` for names and keys."""
    if message.role not in _ROLES and word(checked_name("messages.role", message.role)) != message.role:
        raise ValueError(f"messages.role must not spell a control token, got {message.role!r}. Use another role.")
    found: Row = {"role": message.role}
    if message.reasoning is not None:
        found["reasoning_content"] = _given(message.reasoning, leaf)
    found["content"] = below(_given(message.content, leaf), _given(message.note, leaf))
    if message.tool_calls:
        found["tool_calls"] = [_call(call, leaf, word) for call in message.tool_calls]
    if message.name is not None:
        found["name"] = word(checked_name("messages.name", message.name))
    if message.tool_call_id is not None:
        found["tool_call_id"] = word(checked_name("messages.tool_call_id", message.tool_call_id))
    return found


def tool_rows(tools: Sequence[Mapping[str, Any]], leaf: Leaf, word: Leaf) -> list[Any]:
    for tool in tools:
        checked_name("tool name", tool.get("function", tool).get("name"))
    return [_value(tool, leaf, word) for tool in tools]


def first_place(text: str, content: str, start: int = 0) -> tuple[int, int] | None:
    """The first place of a content, in any of the forms that templates write it in."""
    for form in forms(content):
        place = text.find(form, start)
        if place >= 0:
            return place, place + len(form)
    return None


def forms(text: str) -> Iterator[str]:
    """What templates do to contents: nothing, stripping, JSON, a Python literal."""
    ways = [(strip, chars) for chars in (None, "\n") for strip in (str.strip, str.lstrip, str.rstrip)]
    stripped = list(dict.fromkeys([text, *(strip(text, chars) for strip, chars in ways)]))
    yield from stripped
    for form in stripped:
        yield json.dumps(form, ensure_ascii=False)[1:-1]
    for form in stripped:
        yield json.dumps(form)[1:-1]
    for form in stripped:
        yield repr(form)[1:-1]
        yield repr(form + "'\"")[1:-4]  # with both quotes in it, Python escapes the single ones


def checked_name(field: str, name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{field} must match {NAME.pattern}, got {str(name)[:80]!r}. Rename it.")
    return name


def _given(text: str, leaf: Leaf) -> str:
    """White space stays as it is: templates ask whether a content is empty."""
    return text if not text or text.isspace() else leaf(text)


def _call(call: ToolCall, leaf: Leaf, word: Leaf) -> Row:
    name = word(checked_name("messages.tool_calls.name", call.name))
    found: Row = {"type": "function", "function": {"name": name, "arguments": _value(call.arguments, leaf, word)}}
    if call.id is not None:
        found["id"] = word(checked_name("messages.tool_calls.id", call.id))
    return found


def _value(value: Any, leaf: Leaf, word: Leaf) -> Any:
    """JSON with `leaf` done to its texts and `word` to its keys."""
    if isinstance(value, str):
        return _given(value, leaf)
    if isinstance(value, Mapping):
        return {word(str(key)): _value(child, leaf, word) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value(child, leaf, word) for child in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    """The texts of a JSON value, without its keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from _texts(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _texts(child)
