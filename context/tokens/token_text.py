"""Tokens as text, one by one: where several together spell one character, it stands with the first of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

MOST_TOKENS_OF_A_CHARACTER = 6
_UNFINISHED = "\ufffd"


class Decoder(Protocol):
    """What turns ids into text: a `TokenCodec`."""

    def decode(self, ids: Sequence[int]) -> str: ...


def pieces(ids: Sequence[int], decoder: Decoder) -> Iterator[tuple[int, int, str]]:
    """Tokens first..last-1 with their text: one token each, or the few that together spell a character.

    Where `ids` begin in the middle of a character, the pieces are right again after MOST_TOKENS_OF_A_CHARACTER.
    """
    alone: dict[int, str] = {}
    first, end = 0, len(ids)
    while first < end:
        token, last = ids[first], first + 1
        if token not in alone:
            alone[token] = decoder.decode([token])
        text = alone[token]
        longest = min(end, first + MOST_TOKENS_OF_A_CHARACTER)
        while text.endswith(_UNFINISHED) and last < longest:
            last += 1
            text = decoder.decode(ids[first:last])
        if text.endswith(_UNFINISHED):
            last, text = first + 1, alone[token]
        yield first, last, text
        first = last
