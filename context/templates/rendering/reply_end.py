"""Finds where a reply ends in the prompt that shows it again, and whether the prompt shows it unchanged.

The tokens of a reply stay as they were sampled. The template's next prompt contains the reply once more. Only the text
after the reply is tokenised and added to the sampled tokens:

    prompt for the reply       <|user|>Which code?<|assistant|>
    sampled reply              It is  78.<|end|>
    next prompt                <|user|>Which code?<|assistant|>It is 78.<|end|><|user|>And pearl's?<|assistant|>
    its tail                                               It is 78.<|end|><|user|>And pearl's?<|assistant|>
    added                                                                  <|user|>And pearl's?<|assistant|>

The reply ends with the first stop token after its last content, where a policy that writes like the template would have
stopped. Nothing can be added if the template writes the reply in another way than when it was the last message: without
its thought, or with a new mark.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from context.messages import Message
from context.templates.chat_template import RenderError
from context.templates.rendering.contents import first_place
from context.tokens.codec import Control

AsLast = Callable[[str | None], str | None]
"""Writes the reply as the last message, from behind its prompt, with another thought if one is given. None: the
template refuses."""
_THOUGHT = "q7thought7q"


@dataclass(frozen=True)
class Sampled:
    """A reply as the policy sampled it."""

    text: str
    stop: int | None
    """The token that ended the reply. None: a stop string ended it."""


@dataclass(frozen=True)
class Tail:
    """The text behind the prompt for a reply: the reply, and what follows it."""

    text: str
    controls: Sequence[Control]
    stops: Mapping[int, str]
    """The stop tokens with their texts."""

    def find_stop(self, start: int = 0, end: int | None = None) -> Control | None:
        """The first stop token that begins from `start` to `end`, both included."""
        found = (each for each in self.controls if each.token in self.stops and each.place.start >= start)
        stop = next(found, None)
        return None if stop is None or (end is not None and stop.place.start > end) else stop

    def find_stop_of(self, sampled: Sampled) -> Control | None:
        """The stop token that ends the reply, if the reply is written as it was sampled, except for white space."""
        stop = self.find_stop()
        return stop if stop is not None and _bare(self.text[: stop.place.start]) == _bare(sampled.text) else None


@dataclass(frozen=True)
class ShownReply:
    """The parts of the reply that a tail shows."""

    message: Message
    end: int
    """The end of the last content of the reply; 0: none is shown."""
    following: int
    """The beginning of the first content that is not of the reply."""
    missing: tuple[str, ...] = ()
    """The contents of the reply that are not shown."""
    as_sampled: bool = False
    """True: the reply is known to be written as it was sampled."""


@dataclass(frozen=True)
class ReplyEnd:
    """The place where a tail continues after the sampled reply."""

    place: int
    closing: Control | None
    """The control token before the place, if it ended the reply."""


def find_reply_end(tail: Tail, shown: ShownReply, sampled: Sampled, as_last: AsLast) -> ReplyEnd | None:
    """Find where the reply ends in the tail. None: the tail shows the reply in another way than when it was the last
    message."""
    if shown.end > shown.following:  # a part of the reply is written behind what follows it
        return None
    stop = tail.find_stop(shown.end, shown.following)  # a later one ends another turn
    if not shown.as_sampled and _is_rewritten(tail, stop, shown, sampled, as_last):
        return None
    if stop is None:
        if not shown.message.tool_calls:
            return ReplyEnd(max(shown.end, _find_end_of_sampled(tail.text, sampled.text)), None)
        raise RenderError(
            "chat template must end a turn of tool calls with one of the stop tokens, got one that does not. "
            "Add its end of turn to the stop tokens."
        )
    if sampled.stop is None:
        return ReplyEnd(stop.place.start, None)
    alone = None if sampled.stop == stop.token else as_last(None)
    closes_reply = alone is None or alone.startswith(tail.text[: stop.place.end].rstrip())
    return ReplyEnd(stop.place.end, stop) if closes_reply else ReplyEnd(stop.place.start, None)  # it opens a turn


def _is_rewritten(tail: Tail, stop: Control | None, shown: ShownReply, sampled: Sampled, as_last: AsLast) -> bool:
    """True if the template writes the reply in another way than while it was the last message."""
    alone = _write_as_last(shown.message, as_last)
    if alone is None:
        return False
    if any(first_place(alone, missing) for missing in shown.missing):
        return True
    said = shown.end if alone.startswith(tail.text[: shown.end]) else 0
    ends = [place for text in tail.stops.values() if (place := alone.find(text, said)) >= 0]
    if stop is None:
        return bool(ends) or not _bare(tail.text).startswith(_bare(alone))
    end = min(ends, default=len(alone))
    if sampled.stop not in (None, stop.token) and ends and not alone[end:].startswith(tail.stops[stop.token]):
        return True
    was, now = _bare(alone[:end]), _bare(tail.text[: stop.place.start])
    return was != now and not _adds_empty_thought(was, now, shown.message, sampled)


def _adds_empty_thought(was: str, now: str, reply: Message, sampled: Sampled) -> bool:
    """True if the template only added an empty thought to the reply while it was the last message."""
    opening = was.removesuffix(now)
    return reply.reasoning is None and opening != was and not _bare(sampled.text).startswith(opening)


def _write_as_last(reply: Message, as_last: AsLast) -> str | None:
    if reply.reasoning == "":  # a template may leave out an empty thought that was said
        thinking = as_last(_THOUGHT)
        if thinking is not None and _THOUGHT in thinking:
            return thinking.replace(_THOUGHT, "")
    return as_last(None)


def _find_end_of_sampled(text: str, sampled: str) -> int:
    """Find the end of the text that the policy sampled, with an end of turn in plain text. 0: it sampled another."""
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
    """The text without its white space."""
    return "".join(text.split())
