"""A conversation as pages show it: the looks of authors, the messages of each turn, and long texts folded."""

import json
from typing import NamedTuple

from context.authors import DISCARD_SUFFIX
from replay.questions import QueryResult

_FOLDED_FROM = 1_500
_FOLDED_LINES = 20
_HEAD = 800
_HEAD_LINES = 12
"""Characters and lines of a folded text that stay visible."""
MOST_SHOWN = 20_000
"""Most characters of one text on a page. `replay show --json` has all."""


_LOOKS = {
    "llm": ("◆", "policy"),
    "llm(do_not_train)": ("◇", "policy, not trained"),
    "user": ("●", "user"),
    "env": ("▲", "environment"),
    "memory": ("■", "memory"),
    "initialization": ("▼", "opening of the task"),
    "template": ("∙", "chat template"),
    "demonstration": ("★", "demonstrator"),
    "history": ("○", "earlier reply"),
}


def style_of(author: str) -> dict[str, str]:
    """Return the look of an author: a shape, a word that screen readers read, and the kind that sets the colour.

    The author's name is shown too.
    """
    name = author.removesuffix(DISCARD_SUFFIX)
    shape, word = _LOOKS.get(name, ("▷", "another author"))
    return {"shape": shape, "word": word, "kind": name.partition("(")[0] if name in _LOOKS else "other"}


class Folded(NamedTuple):
    """A text of which only the beginning is visible. `head` and `rest` follow each other without a gap."""

    head: str
    rest: str
    left: int
    """Number of characters that are not on the page."""


def fold_text(text: str) -> Folded:
    if len(text) <= _FOLDED_FROM and text.count("\n") < _FOLDED_LINES:
        return Folded(text, "", 0)
    head = "\n".join(text[:_HEAD].split("\n", _HEAD_LINES)[:_HEAD_LINES])
    shown = text[:MOST_SHOWN]
    return Folded(head, shown[len(head) :], len(text) - len(shown))


_ONE_LINE = 80


def indent_json(text: str) -> str | None:
    """Return JSON with a line per value. None: the text is not a JSON object or list, or is short enough for one line.

    Numbers are written as Python reads them. If a key occurs twice, its last value counts.
    """
    if not _ONE_LINE < len(text) <= MOST_SHOWN or not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def find_spans(found: QueryResult, first: int, last: int) -> list[tuple[int | None, int, int]]:
    """Return (number, begin, end) of the messages of each turn from `first` to `last`, or of each request of a session.

    A turn is a reply with the messages that answer it. The replies are the last `num_turns` messages of action authors;
    earlier messages are the opening, whose number is None. A request has the messages that it added to the conversation
    that it continues. Messages that the agent's program wrote behind its last request have the number None too.
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


def shown_message(message: QueryResult) -> QueryResult:
    """Prepare a message for a template. Each of its `texts` has a label; that of the message's content is empty."""
    content, texts = message["content"], []
    if message["reasoning"]:
        texts.append(("reasoning", message["reasoning"]))
    if content or not (message["tool_calls"] or message["reasoning"]):
        texts.append(("", indent_json(content) or content))
    if message["note"]:
        texts.append(("note", message["note"]))
    for call in message["tool_calls"]:
        given = json.dumps(call["arguments"], ensure_ascii=False)
        texts.append((f"calls {call['name']}", indent_json(given) or given))
    named = {name: message[name] for name in ("author", "role", "name", "error_kind", "reward")}
    parts = [{"label": label, "shown": fold_text(text)} for label, text in texts]
    return {**named, "style": style_of(message["author"]), "texts": parts}
