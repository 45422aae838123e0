"""The texts of messages: their form for a template, and their places in the text that it wrote."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from context.authors import MEMORY
from context.messages import Change, Message, changed, to_template
from context.parse import NAME
from context.templates.rendering.written_text import find_marked_contents
from context.tokens.codec import Span

_ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function", "observation")
"""Roles that templates write as they are: some are control tokens of some tokenizers."""
Row = dict[str, Any]
_LONG = 32
"""Characters of a text that nothing else spells by chance."""
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\n*", re.DOTALL)


@dataclass(frozen=True)
class Content:
    """A text of a message."""

    text: str
    author: str
    required: bool
    """True: a template that leaves the content out hides what was said."""


@dataclass(frozen=True)
class PlacedContent:
    """A content with its place in a text."""

    message: int
    content: Content
    place: Span | None
    """None: the content stands nowhere in the text."""


def contents(message: Message) -> Iterator[Content]:
    """The contents of a message that are not blank, in the order in which `row` gives them to its leaf function."""
    # Templates may leave out earlier thinking, and what a policy said with a call.
    found = [
        Content(message.reasoning or "", message.author, False),
        Content(message.content, message.author, not message.tool_calls),
        Content(message.note, MEMORY, True),
    ]

    def keep(text: str) -> str:
        found.append(Content(text, message.author, True))
        return text

    for call in message.tool_calls:
        changed(call.arguments, keep, str)
    return (content for content in found if content.text and not content.text.isspace())


def with_thought(message: Message) -> Message:
    """The message with the thought that opens its content in `reasoning` instead."""
    found = _THOUGHT.match(message.content) if message.role == "assistant" and message.reasoning is None else None
    if found is None:
        return message
    return replace(message, reasoning=found[1].strip("\n"), content=message.content[found.end() :])


def row(message: Message, leaf: Change, word: Change) -> Row:
    """The message in the form of `to_template`. Raises ValueError for a name that could spell a control token."""
    if message.role not in _ROLES and word(checked_name("messages.role", message.role)) != message.role:
        raise ValueError(f"messages.role must not spell a control token, got {message.role!r}. Use another role.")
    named = [("name", message.name), ("tool_call_id", message.tool_call_id)]
    for call in message.tool_calls:
        named += [("tool_calls.name", call.name), ("tool_calls.id", call.id)]
    for field, name in named:
        if name is not None:
            checked_name(f"messages.{field}", name)
    return to_template(message, leaf, word)


def tool_rows(tools: Sequence[Mapping[str, Any]], leaf: Change, word: Change) -> list[Any]:
    for tool in tools:
        checked_name("tool name", tool.get("function", tool).get("name"))
    return [changed(tool, leaf, word) for tool in tools]


def first_place(text: str, content: str, start: int = 0) -> Span | None:
    """The first place of a content, in any of the forms in which templates write it."""
    for form in forms(content):
        if (place := text.find(form, start)) >= 0:
            return Span(place, place + len(form))
    return None


def place_contents(
    text: str, messages: Sequence[tuple[int, Message]], start: int, write_marked: Callable[[], str]
) -> list[PlacedContent]:
    """Find the contents of messages, which are given with their numbers, in the text from character `start` on.

    `write_marked` writes the text again, with numbered marks around the contents. That takes as long as the whole
    conversation is. It is left out if all contents are required and long, and no message makes a call: a call may
    have numbers, which are no contents and may spell one.
    """
    wanted = [(number, content) for number, message in messages for content in contents(message)]
    is_long = all(content.required and len(content.text.strip()) >= _LONG for _, content in wanted)
    has_calls = any(message.tool_calls for _, message in messages)
    found = _places_in_turn(text, wanted, start) if is_long and not has_calls else {}
    if len(found) < len(wanted):
        unmarked, found = find_marked_contents(write_marked())
        if unmarked != text:  # a template that looks at how contents begin or end
            found = _places_in_turn(text, wanted, start)
    return [PlacedContent(number, content, found.get(place)) for place, (number, content) in enumerate(wanted)]


def _places_in_turn(text: str, wanted: Sequence[tuple[int, Content]], start: int) -> dict[int, Span]:
    """The first place of each content, behind the contents of the message before.

    The longest content of a message is looked for first, so that a shorter one is not found within it.
    """
    found: dict[int, Span] = {}
    at = start
    for _, group in groupby(range(len(wanted)), lambda number: wanted[number][0]):
        taken: list[Span] = []
        for number in sorted(group, key=lambda number: -len(wanted[number][1].text)):
            content = wanted[number][1].text
            place = first_place(text, content, at)  # a template may sort arguments
            while place is not None and any(place.overlaps(other) for other in taken):
                place = first_place(text, content, place.start + 1)
            if place is not None:
                found[number] = place
                taken.append(place)
        at = max((place.end for place in taken), default=at)
    return found


def forms(text: str) -> Iterable[str]:
    """The content as templates write it, without white space at its ends: as it is, as JSON, as a Python literal."""
    inner = text.strip()
    as_json = (json.dumps(inner, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))
    # With both quotes in it, Python escapes the single ones.
    return dict.fromkeys((inner, *as_json, repr(inner)[1:-1], repr(inner + "'\"")[1:-4]))


def checked_name(field: str, name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{field} must match {NAME.pattern}, got {str(name)[:80]!r}. Rename it.")
    return name
