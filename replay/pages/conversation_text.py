"""A conversation as people read it: who speaks, which messages make a turn, what of a long text is folded away."""

import json
from typing import NamedTuple

from context.authors import DISCARD_SUFFIX
from replay.questions import QueryResult

_FOLDED_FROM = 1_500
_FOLDED_LINES = 20
_HEAD = 800
_HEAD_LINES = 12
"""What of a folded text stays in sight."""
MOST_SHOWN = 20_000
"""Characters of one text on a page of many; the rest has an address of its own."""


class AuthorStyle(NamedTuple):
    """How an author is distinguished from others: by a shape, a colour, and always by its name."""

    shape: str
    kind: str


_STYLES = {
    "llm": AuthorStyle("◆", "llm"),
    "llm(do_not_train)": AuthorStyle("◇", "llm"),
    "user": AuthorStyle("●", "user"),
    "env": AuthorStyle("▲", "env"),
    "memory": AuthorStyle("■", "memory"),
    "initialization": AuthorStyle("▼", "initialization"),
    "template": AuthorStyle("∙", "template"),
    "demonstration": AuthorStyle("★", "demonstration"),
    "history": AuthorStyle("○", "history"),
}


def style_of(author: str) -> AuthorStyle:
    return _STYLES.get(author.removesuffix(DISCARD_SUFFIX), AuthorStyle("▷", "other"))


class Folded(NamedTuple):
    """A text of which the beginning is in sight. The parts follow each other without a gap."""

    head: str
    rest: str
    characters: int
    left: int
    """Characters that are not on the page at all."""


def folded(text: str) -> Folded:
    if len(text) <= _FOLDED_FROM and text.count("\n") < _FOLDED_LINES:
        return Folded(text, "", len(text), 0)
    head = "\n".join(text[:_HEAD].split("\n", _HEAD_LINES)[:_HEAD_LINES])
    shown = text[:MOST_SHOWN]
    return Folded(head, shown[len(head) :], len(text), len(text) - len(shown))


_ONE_LINE = 80


def indented(text: str) -> str | None:
    """JSON with a line per value; None for what is no object or list, and for what one line does for.

    Numbers are written as Python reads them, and of a key that stands twice the last one counts.
    """
    if not _ONE_LINE < len(text) <= MOST_SHOWN or not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def spans(found: QueryResult, first: int, last: int) -> list[tuple[int | None, int, int]]:
    """(number, begin, end) of the messages of turns `first` to `last` of a conversation, or of requests of a session;
    without a number, of what opened the conversation, or what the agent's program wrote behind its last request.

    A turn is a reply with what came back. The last `num_turns` messages of an action author are the replies; what was
    spoken before is the opening's. A request has what it added to the conversation that it goes on from.
    """
    messages, asked = found["messages"], found["requests"]
    if asked:
        begun = [(one["number"], one["first_message"], one["first_message"] + one["num_messages"]) for one in asked]
        rest = [(None, begun[-1][2], len(messages))] if last >= len(asked) and begun[-1][2] < len(messages) else []
        return [*begun[first:last], *rest]
    action = {author["name"] for author in found["authors"] if author["action"]}
    acted = [place for place, message in enumerate(messages) if message["author"] in action]
    starts = acted[max(0, len(acted) - found["record"]["num_turns"]) :]
    ends = [*starts[1:], len(messages)]
    turns = zip(range(len(starts)), starts, ends, strict=False)
    opening = starts[0] if starts else len(messages)
    return [*([(None, 0, opening)] if first == 0 and opening else []), *list(turns)[first:last]]


def shown_message(message: QueryResult, position: int) -> QueryResult:
    """A message with its `texts`, each with a label; none: the message itself, whose JSON is laid out in lines."""
    content, texts = message["content"], []
    if message["reasoning"]:
        texts.append(("reasoning", message["reasoning"]))
    if content or not (message["tool_calls"] or message["reasoning"]):
        texts.append(("", indented(content) or content))
    if message["note"]:
        texts.append(("note", message["note"]))
    for call in message["tool_calls"]:
        given = json.dumps(call["arguments"], ensure_ascii=False)
        texts.append((f"calls {call['name']}", indented(given) or given))
    named = {name: message[name] for name in ("author", "role", "name", "error_kind")}
    parts = [{"label": label, "shown": folded(text)} for label, text in texts]
    return {**named, "position": position, "style": style_of(message["author"]), "texts": parts}
