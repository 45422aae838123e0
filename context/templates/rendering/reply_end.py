"""Where a reply's turn ends in the text that shows it and what follows, and whether it is shown as it was said."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from context.messages import Message
from context.templates.chat_template import RenderError
from context.templates.rendering.contents import first_place
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
class Sampled:
    text: str
    stop: int | None
    """The token that ended it; None: a stop string."""


@dataclass(frozen=True)
class Shown:
    end: int
    """Where its last content ends."""
    missing: tuple[str, ...]


def is_as_sampled(text: str, controls: Sequence[Control], stops: Mapping[int, str], sampled: str) -> bool:
    """Whether the template writes the reply as the policy did, white space aside, up to its first stop token."""
    found = next((control for control in controls if control.token in stops), None)
    return found is not None and _bare(text[: found.first]) == _bare(sampled)


def reply_end(
    tail: Tail, reply: Message, shown: Shown | None, stops: Mapping[int, str], sampled: Sampled, ended: Ended
) -> tuple[int, Control | None] | None:
    """The character at which what follows `reply` begins, and the control token before it, if one ends the reply.

    The template's version of the reply ends at its first stop token, where a policy that writes like the template
    would have stopped. `stops`: the stop tokens with their texts. `shown` is None if the template's version is known to
    be what was sampled. None is returned where the reply is not shown as it would be if it were the last.
    """
    text, said = tail.text, 0 if shown is None else shown.end
    if said > tail.following:  # some of it is written behind what follows
        return None
    found = next((control for control in tail.controls if control.token in stops and control.first >= said), None)
    if found is not None and found.first > tail.following:  # the end of another turn
        found = None
    if shown is not None and _written_otherwise(text, found, reply, shown, stops, sampled, ended):
        return None
    if found is None:
        if not reply.tool_calls:
            return max(said, _written_until(text, sampled.text)), None
        raise RenderError(
            "chat template must end a turn of tool calls with one of the stop tokens, got one that does not. "
            "Add its end of turn to the stop tokens."
        )
    if sampled.stop is None:
        return found.first, None
    last = None if sampled.stop == found.token else ended(None)
    if last is None or last.startswith(text[: found.end].rstrip()):  # it closes the reply
        return found.end, found
    return found.first, None  # it opens the next turn


def _written_otherwise(
    text: str,
    found: Control | None,
    reply: Message,
    shown: Shown,
    stops: Mapping[int, str],
    sampled: Sampled,
    ended: Ended,
) -> bool:
    """Whether the template writes the reply otherwise, now that something follows it, than while it was the last."""
    last = _as_last(reply, ended)
    if last is None:
        return False
    said = shown.end if last.startswith(text[: shown.end]) else 0
    ends = [place for stop in stops.values() if (place := last.find(stop, said)) >= 0]
    if found is None:
        changed = bool(ends) or not _bare(text).startswith(_bare(last))
    else:
        last_stop = last[min(ends) :] if ends else stops[found.token]
        as_last, now = _bare(last[: min(ends, default=len(last))]), _bare(text[: found.first])
        opening = as_last.removesuffix(now)  # an empty thought that nobody said
        unsaid = reply.reasoning is None and opening != as_last and not _bare(sampled.text).startswith(opening)
        changed = as_last != now and not unsaid
        changed |= sampled.stop not in (None, found.token) and not last_stop.startswith(stops[found.token])
    return changed or any(first_place(last, missing) for missing in shown.missing)


def _as_last(reply: Message, ended: Ended) -> str | None:
    if reply.reasoning == "":  # a template may leave out an empty thought that was said
        thinking = ended(_THOUGHT)
        if thinking is not None and _THOUGHT in thinking:
            return thinking.replace(_THOUGHT, "")
    return ended(None)


def _written_until(text: str, sampled: str) -> int:
    """Where the text ends that the policy has written too, an end of turn of its own among it; 0: it wrote another."""
    place = 0
    for character in sampled.strip():
        if not character.isspace():
            while place < len(text) and text[place].isspace():
                place += 1
            if not text.startswith(character, place):
                return 0
            place += 1
    behind = sampled[len(sampled.rstrip()) :]
    return place + len(behind) if text.startswith(behind, place) else place


def _bare(text: str) -> str:
    return "".join(text.split())
