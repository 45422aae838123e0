"""Byte-level tokenizers (GPT-2 and its heirs): each token stands for bytes of the text, so its place can be counted."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from context.tokens.tokenizer_parts import Description

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
"""How they spell bytes that are no printable character."""


def is_byte_level(description: Description) -> bool:
    return '"ByteLevel"' in json.dumps(description.get("decoder"))


def spelled_bytes(token: str) -> bytes:
    """The bytes behind a token's name in the vocabulary."""
    return bytes(_BYTE_OF[character] for character in token)


class TokenPlaces:
    """Where the tokens of a text begin, counted from the number of bytes of each."""

    def __init__(self, description: Description, vocabulary: Mapping[str, int], added: Collection[int]) -> None:
        """`vocabulary`: all tokens and their ids; the `added` ones are spelled as they are."""
        normalizer = description.get("normalizer")
        self._composes = normalizer is not None and normalizer["type"] == "NFC"
        self._counts = is_byte_level(description) and (normalizer is None or self._composes)
        self._sizes = np.zeros(max(vocabulary.values(), default=0) + 1, np.int64)
        for token, number in vocabulary.items():
            self._sizes[number] = len(token.encode()) if number in added else len(token)

    def firsts(self, text: str, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
        """The character in which each token begins; None where the tokens are not byte for byte the text's own."""
        if not self._counts or (self._composes and not unicodedata.is_normalized("NFC", text)):
            return None
        sizes, written = self._sizes[ids], np.frombuffer(text.encode(), np.uint8)
        ends = np.cumsum(sizes)
        if not len(ids) or ends[-1] != len(written):
            return None
        character = np.cumsum((written & 0xC0) != 0x80, dtype=np.int32) - np.int32(1)
        return np.asarray(character[ends - sizes], np.int32)
