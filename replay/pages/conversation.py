"""A trajectory's messages by turns, as the page shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replay.pages.reading import AuthorStyle, Folded, folded, indented, style_of
from replay.questions import QueryResult


@dataclass(frozen=True)
class Text:
    """One thing that was said."""

    label: str
    """Empty: the message itself."""
    shown: Folded
    exact: Folded | None = None
    """What was written, where what is shown is laid out in another way."""


@dataclass(frozen=True)
class ShownMessage:
    """One message."""

    position: int
    author: str
    style: AuthorStyle
    role: str
    name: str | None
    texts: tuple[Text, ...]


@dataclass(frozen=True)
class ShownTurn:
    """A reply with what came back; or what stands before the first one."""

    number: int | None
    said: tuple[ShownMessage, ...]


def turns(
    messages: Sequence[QueryResult], authors: Sequence[Mapping[str, Any]], num_turns: int, *, first: int, count: int
) -> list[ShownTurn]:
    """`count` turns from `first` on, and before the very first one what opened the conversation.

    The last `num_turns` messages of an action author are the turns; what was spoken before is the opening's.
    """
    action = {author["name"] for author in authors if author["action"]}
    acted = [place for place, message in enumerate(messages) if message["author"] in action]
    starts = acted[max(0, len(acted) - num_turns) :]
    spans: list[tuple[int | None, int, int]] = [(None, 0, starts[0] if starts else len(messages))] if first == 0 else []
    ends = [*starts[1:], len(messages)]
    spans += [(turn, starts[turn], ends[turn]) for turn in range(first, min(first + count, len(starts)))]
    return [
        ShownTurn(number, tuple(shown_message(messages[place], place) for place in range(start, end)))
        for number, start, end in spans
        if start < end
    ]


def shown_message(message: QueryResult, position: int) -> ShownMessage:
    texts = [Text("reasoning", folded(message["reasoning"]))] if message["reasoning"] else []
    if message["content"] or not (message["tool_calls"] or message["reasoning"]):
        texts.append(_laid_out(message["content"]))
    if message["note"]:
        texts.append(Text("note", folded(message["note"])))
    for call in message["tool_calls"]:
        given = json.dumps(call["arguments"], ensure_ascii=False)
        texts.append(Text(f"calls {call['name']}", folded(indented(given) or given)))
    return ShownMessage(
        position, message["author"], style_of(message["author"]), message["role"], message["name"], tuple(texts)
    )


def _laid_out(text: str) -> Text:
    pretty = indented(text)
    return Text("", folded(text)) if pretty is None or pretty == text else Text("", folded(pretty), folded(text))
