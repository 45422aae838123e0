"""Texts that end a reply while it is sampled."""

from __future__ import annotations

from collections.abc import Sequence

from context.parse.reply import before_stop
from context.tokens.token_sequence import MOST_TOKENS_OF_A_CHARACTER, Decoder


class StopStrings:
    """Says of sampled tokens whether the last of them completed one of `texts`."""

    def __init__(self, texts: Sequence[str], codec: Decoder) -> None:
        self._texts = tuple(texts)
        self._codec = codec
        # A token spells at least a byte.
        self._longest = max((len(text.encode()) for text in texts), default=0) + MOST_TOKENS_OF_A_CHARACTER

    def __bool__(self) -> bool:
        return bool(self._texts)

    def completed(self, token_ids: Sequence[int]) -> bool:
        return before_stop(self._codec.decode(token_ids[-self._longest :]), self._texts) is not None
