"""Where in a rendering an assistant message stands that somebody wrote in the policy's place.

Its turn is all that the policy would have had to sample: what follows the generation prompt, markup of thinking and
calls among it, up to and with the stop token. Texts here are renderings with a numbered mark before and behind each
content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from context.templates.chat_template import RenderError
from context.templates.rendering import marks
from context.templates.rendering.contents import shared_opening
from context.templates.rendering.marks import Span
from context.tokens.codec import TokenCodec


@dataclass(frozen=True)
class Around:
    """The conversation up to a message, rendered in three ways."""

    without: str
    """Before it, without a generation prompt."""
    prompt: str
    """Before it, with one."""
    ended: str
    """Ending in it."""


def turn_spans(
    marked: str,
    write: Callable[[int, bool], str],
    speakers: Mapping[int, str],
    codec: TokenCodec,
    stop_ids: frozenset[int],
) -> list[Span]:
    """The turns of the messages of these numbers; `write` renders the first so many messages, with a prompt or without.

    Places are those of the text without marks.
    """
    spans = []
    for number, author in speakers.items():
        around = Around(write(number, False), write(number, True), write(number + 1, False))
        first, end = turn_span(marked, around, codec, stop_ids)
        before, turn = (len(marks.numbered_spans(part)[0]) for part in (marked[:first], marked[first:end]))
        spans.append(Span(before, before + turn, author))
    return spans


def turn_span(neutral: str, around: Around, codec: TokenCodec, stop_ids: frozenset[int]) -> tuple[int, int]:
    """First and last character (exclusive) of a message's turn in `neutral`, the whole conversation.

    A template that opens thinking in its generation prompt, and not in earlier turns, has the turn begin where the two
    part. One that ends earlier turns otherwise than with the stop token of the last has it end with its last content.
    Raises RenderError where the message is not written like a reply at all.
    """
    start = _behind(neutral, around, codec)
    if start == 0:  # no token before it could predict the first one
        raise RenderError(
            "chat template must write something before an action author's message, got nothing. Begin with another one."
        )
    content = marks.last_end(around.ended)
    if content and content not in around.prompt:
        end_of_reply = neutral.find(content, start) + len(content)
        tail = around.ended.rpartition(content)[2]
        if end_of_reply < start + len(content):
            raise _unlike_a_reply(neutral[start : start + 40])
    else:
        end_of_reply = start
        tail = around.ended.removeprefix(around.prompt)
        tail = tail.rpartition(content)[2] if content else tail
    stop = codec.first_of(stop_ids, neutral[end_of_reply : marks.next_begin(neutral, end_of_reply)])
    expected = codec.first_of(stop_ids, tail)
    if stop is not None and expected is not None and stop[0] == expected[0]:
        return start, end_of_reply + stop[1]
    return start, end_of_reply + len(tail) if neutral.startswith(tail, end_of_reply) else end_of_reply


def _behind(neutral: str, around: Around, codec: TokenCodec) -> int:
    """Where the generation prompt ends, or where the message parts from it."""
    content = marks.last_end(around.prompt)
    asked, without = (_from(content, text) for text in (around.prompt, around.without))
    if neutral.startswith(around.prompt):
        return len(around.prompt)
    at = neutral.find(content)  # what is before that content, a template may write in another way
    written = neutral[at : marks.next_begin(neutral, at + len(content))]
    cut = len(content) + codec.boundary(written[len(content) :], len(shared_opening(asked, written)) - len(content))
    if at < 0 or cut <= len(without):
        raise _unlike_a_reply(written[-40:])
    return at + cut


def _from(content: str, text: str) -> str:
    """The text from its last content on."""
    return content + text.rpartition(content)[2] if content else text


def _unlike_a_reply(text: str) -> RenderError:
    return RenderError(
        "chat template must write an action author's message as it writes a reply, behind the generation prompt, "
        f"got one that does not at {text!r}. Use author 'initialization', or another template."
    )
