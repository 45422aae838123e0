"""Turns texts of a template into tokens, each with the author of its text.

    text         <|user|>Which code?<|end|>
    passages     characters 8 to 18 are the user's
    tokens       <|user|>   Which   code   ?      <|end|>
    authors      template   user    user   user   template

A text is cut only at the control tokens that its template wrote, so the tokenizer makes the same tokens as from the
whole text. If the text between two cuts spells a control token, a tokenizer without control tokens encodes it. A token
across the border of two authors belongs to the author of its first character.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import numpy as np

from context.authors import TEMPLATE, AuthorTable
from context.messages import Message
from context.templates.rendering.contents import contents
from context.tokens.codec import Control, Piece, Span, TokenCodec
from context.tokens.token_sequence import TokenSequence
from context.wording import storable

_MOST_PIECES = 4096
"""Stretches whose tokens are kept: a text that is shown again is not tokenised again."""


@dataclass(frozen=True)
class Passage:
    """A part of a text that one author wrote."""

    place: Span
    author: str

    def moved(self, by: int) -> Self:
        return replace(self, place=self.place.moved(by))


@dataclass(frozen=True)
class _Stretch:
    """A part of a text that is tokenised at once: a control token, if one begins it, and the text up to the next."""

    control: Control | None
    place: Span


class TokenWriter:
    """Makes the tokens of a text, with an author for each."""

    def __init__(self, codec: TokenCodec, authors: AuthorTable) -> None:
        self._authors = authors
        self._template_code = authors.code(TEMPLATE)
        self._piece = lru_cache(_MOST_PIECES)(
            lambda text, control, opens: codec.piece(storable(text), control, opens=opens)
        )

    def count(self, message: Message) -> int:
        """The number of tokens in a message's contents, without what the template writes around them."""
        return sum(len(self._piece(content.text, None, False).ids) for content in contents(message))

    def write(
        self,
        text: str,
        controls: Sequence[Control],
        passages: Sequence[Passage] = (),
        *,
        start: int = 0,
        lead: Control | None = None,
        opens: bool = True,
    ) -> TokenSequence:
        """The tokens from `start` on, or from after `lead`, the control token before it.

        `opens`: the text is at the very beginning.
        """
        stretches = _cut(text, controls, start, lead)
        pieces = [self._encode(text, stretch, opens=opens) for stretch in stretches]
        codes = [np.full(len(piece.ids), self._template_code, np.uint8) for piece in pieces]
        starts = [stretch.place.start for stretch in stretches]
        for passage in passages:
            code, place = self._authors.code(passage.author), passage.place
            for number in range(max(0, bisect_right(starts, place.start) - 1), bisect_left(starts, place.end)):
                piece, within = pieces[number], stretches[number].place
                first = piece.find_token(place.start - within.start)
                end = len(piece.ids) if place.end >= within.end else piece.find_token(place.end - within.start)
                codes[number][first:end] = code
        skipped = 0 if lead is None else 1
        ids = np.concatenate([piece.ids for piece in pieces])
        return TokenSequence.unsampled(ids[skipped:], np.concatenate(codes)[skipped:])

    def _encode(self, text: str, stretch: _Stretch, *, opens: bool) -> Piece:
        control, start = stretch.control, stretch.place.start
        within = None if control is None else Control(control.token, control.place.moved(-start))
        piece: Piece = self._piece(stretch.place.cut_from(text), within, opens and start == 0)
        return piece


def _cut(text: str, controls: Sequence[Control], start: int, lead: Control | None) -> list[_Stretch]:
    heads: list[Control | None] = [*([lead] if lead else []), *(c for c in controls if c.place.start >= start)]
    if lead is None and not (heads and heads[0] and heads[0].place.start == start):
        heads.insert(0, None)
    starts = [start if head is None else head.place.start for head in heads]
    places = map(Span, starts, [*starts[1:], len(text)])
    return [_Stretch(head, place) for head, place in zip(heads, places, strict=True)]
