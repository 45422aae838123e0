"""Where a reply's turn ends in the text that shows it and what follows, and whether it is shown as it was said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from context.messages import Message
from context.templates.chat_template import RenderError
from context.templates.contents import contents, first_place
from context.tokens.codec import Control

Ended = Callable[[str | None], str | None]
"""How the template writes the conversation that ends in the reply, with another thought if one is given; from behind
the prompt for the reply. None where it refuses."""
_THOUGHT = "q7thought7q"


@dataclass(frozen=True)
class Tail:
    """The text behind the prompt for a reply: the reply, and what follows it."""

    text: str
    controls: list[Control]
    following: int
    """Where the first content that follows the reply begins."""


@dataclass(frozen=True)
class ReplyEnd:
    cut: int
    """What follows the reply begins at this character."""
    lead: Control | None
    """The control token before it."""
    controls: list[Control]


def reply_end(
    tail: Tail, reply: Message, stops: Mapping[int, str], stop: int | None, ended: Ended
) -> ReplyEnd | None:
    """Where the turn of `reply` ends. `stops`: the stop tokens with their texts; `stop`: the one the reply ended in.

    The template's version of the reply ends at its first stop token, where a policy that writes like the template
    would have stopped. None: it is not shown as it would be if it were the last.
    """
    text, controls = tail.text, tail.controls
    said, complete = _said_until(text[: tail.following], reply)
    found = next((control for control in controls if control.token in stops and control.first >= said), None)
    if found is not None and found.first > tail.following:  # the end of another turn
        found = None
    upto = said if found is None else found.first
    if (not complete or reply.reasoning == "") and _changed(text[:upto], reply, ended):
        return None
    if found is None:
        if _is_closed(ended(None), text[:said], stops):
            return None
        if not reply.tool_calls:
            return ReplyEnd(said, None, controls)
        raise RenderError(
            "chat template must end a turn of tool calls with one of the stop tokens, got one that does not. "
            "Add its end of turn to the stop tokens."
        )
    if stop == found.token or _ends_by_itself(text, found, ended):
        if stop is None:  # nobody sampled it
            return ReplyEnd(found.first, None, controls)
        return ReplyEnd(found.end, found, controls)
    return ReplyEnd(found.first, None, controls)  # what opens the next turn


def _said_until(tail: str, reply: Message) -> tuple[int, bool]:
    """Where the last content of the reply ends, and whether all of them are there."""
    end, complete = 0, True
    for content in contents(reply):
        place = first_place(tail, content.text)
        if place is None:
            complete = False
        else:
            end = max(end, place[1])
    return end, complete


def _changed(shown: str, reply: Message, ended: Ended) -> bool:
    """Whether the template writes the reply otherwise now that something follows it."""
    if reply.reasoning == "":  # a template may leave out an empty thought that was said
        thinking = ended(_THOUGHT)
        if thinking is not None and _THOUGHT in thinking:
            return not _bare(thinking.replace(_THOUGHT, "")).startswith(_bare(shown))
    last = ended(None)
    return last is not None and not last.startswith(shown.rstrip())


def _bare(text: str) -> str:
    return "".join(text.split())


def _ends_by_itself(tail: str, found: Control, ended: Ended) -> bool:
    """Whether the stop token closes the reply, rather than opens what follows."""
    last = ended(None)
    return last is None or last.startswith(tail[: found.end].rstrip())


def _is_closed(last: str | None, shown: str, stops: Mapping[int, str]) -> bool:
    """Whether the reply ends in a stop token while it is the last."""
    return last is not None and last.removeprefix(shown).lstrip().startswith(tuple(stops.values()))
