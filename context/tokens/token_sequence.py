"""Exact tokens with their provenance, and the texts that they spell. `loss_mask` says which of them are trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

NOT_SAMPLED = -1
"""The policy version of a token that no policy of the run sampled."""
SegmentReason = Literal["clean", "template_rewrite", "strategy_rewrite", "fork"]
BehaviorContext = Literal["plain", "hinted", "relabelled"]
MOST_TOKENS_OF_A_CHARACTER = 6
_UNFINISHED = "\ufffd"


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """Tokens from left to right. Index t of every array describes token t."""

    token_ids: npt.NDArray[np.int32]
    authors: npt.NDArray[np.uint8]
    """Codes of the run's author table."""
    behavior_log_probs: npt.NDArray[np.float32]
    """Nats, under the policy that sampled the token; NaN where no behavior policy is known, never 0."""
    policy_versions: npt.NDArray[np.int32]
    """The number of publishes before the token was sampled; -1 where it was not sampled."""

    def __post_init__(self) -> None:
        for name, dtype in TOKEN_FIELDS.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1:
                raise ValueError(f"{name} must be a vector of {dtype.__name__}, got {array.dtype}{list(array.shape)}.")
            if len(array) != len(self.token_ids):
                raise ValueError(f"{name} must have one entry per token ({len(self.token_ids)}), got {len(array)}.")
            array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def concatenate(cls, parts: Iterable[TokenSequence]) -> TokenSequence:
        rows = list(parts)
        return cls(
            *(np.concatenate([getattr(p, f) for p in rows] or [np.empty(0, d)]) for f, d in TOKEN_FIELDS.items())
        )

    @classmethod
    def unsampled(cls, token_ids: npt.NDArray[np.int32], authors: npt.NDArray[np.uint8]) -> TokenSequence:
        n = len(token_ids)
        return cls(token_ids, authors, np.full(n, np.nan, np.float32), np.full(n, NOT_SAMPLED, np.int32))

    @classmethod
    def constant(cls, token_ids: Iterable[int], author_code: int) -> TokenSequence:
        """Tokens of one author that no policy sampled."""
        ids = np.array(list(token_ids), dtype=np.int32)
        return cls.unsampled(ids, np.full(len(ids), author_code, np.uint8))

    def part(self, start: int, end: int) -> TokenSequence:
        return TokenSequence(*(getattr(self, name)[start:end] for name in TOKEN_FIELDS))

    def equals(self, other: TokenSequence) -> bool:
        """Bit-equal in every field (NaN equals NaN)."""
        return all(getattr(self, f).tobytes() == getattr(other, f).tobytes() for f in TOKEN_FIELDS)


TOKEN_FIELDS: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "authors": np.uint8,
    "behavior_log_probs": np.float32,
    "policy_versions": np.int32,
}
"""The arrays of a TokenSequence, in its order."""


@dataclass(frozen=True, eq=False)
class Segment:
    """One training sequence of a trajectory. A strategy that rewrites history makes several."""

    tokens: TokenSequence
    reason: SegmentReason = "clean"
    """Why the segment was begun. `clean`: it is the first. `template_rewrite`, `strategy_rewrite`: the template or the
    strategy rewrote what was shown before. `fork`: it asks a question about the context."""
    behavior_context: BehaviorContext = "plain"
    """The policy's view when it sampled the tokens. `hinted`: a hint, which is left out here. `relabelled`: another
    conversation, which ends as this one does. The log-probs are unknown in both cases."""


class Decoder(Protocol):
    """Turns ids into text, as a `TokenCodec` does."""

    def decode(self, ids: Sequence[int]) -> str: ...


def pieces(ids: Sequence[int], decoder: Decoder) -> Iterator[tuple[int, int, str]]:
    """The stretches of a sequence as (start, end, text): one token, or the few that spell one character together."""
    alone: dict[int, str] = {}
    start = 0
    while start < len(ids):
        token, end = ids[start], start + 1
        if token not in alone:
            alone[token] = decoder.decode([token])
        text = alone[token]
        longest = min(len(ids), start + MOST_TOKENS_OF_A_CHARACTER)
        while text.endswith(_UNFINISHED) and end < longest:
            end += 1
            text = decoder.decode(ids[start:end])
        if text.endswith(_UNFINISHED):
            end, text = start + 1, alone[token]
        yield start, end, text
        start = end
