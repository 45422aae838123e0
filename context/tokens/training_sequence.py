"""The training sequences of an episode while they grow, and which sampled tokens are kept out of training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from context.authors import DEMONSTRATION, LLM, LLM_DO_NOT_TRAIN, AuthorTable, discarded
from context.tokens.codec import TokenCodec
from context.tokens.token_sequence import NOT_SAMPLED, BehaviorContext, Segment, SegmentReason, TokenSequence, pieces

_ROUNDING = 1e-2
"""Nats by which an engine in 16 bits may round a certain token's log-prob above 0."""


@dataclass(frozen=True)
class TrainingControl:
    """Withheld tokens stay sampled tokens, with their log-probs; they only carry no loss."""

    keep_turns: tuple[int, ...] | None = None
    """The only turns to train; None: all. Turns count from 0, negative ones from the end of the episode."""
    discard_turns: tuple[int, ...] = ()
    """Turns not to train, kept or not."""
    blackout: tuple[str, ...] = ()
    """Texts whose first occurrence in each reply is not trained, however it was sampled."""
    blackout_after_end: bool = True
    """Nothing behind a reply's first stop token is trained; the stop token is."""

    def __post_init__(self) -> None:
        if not all(self.blackout):
            raise ValueError("blackout must hold texts of at least one character, got ''. Remove it.")

    def trains(self, turn: int, num_turns: int) -> bool:
        named = {turn, turn - num_turns}
        kept = self.keep_turns is None or not named.isdisjoint(self.keep_turns)
        return kept and named.isdisjoint(self.discard_turns)

    def untrained(self, token_ids: Sequence[int], codec: TokenCodec, stop_ids: frozenset[int]) -> npt.NDArray[np.bool_]:
        """[T] True = a rule of this control keeps the token of this reply out of training."""
        mask = np.zeros(len(token_ids), bool)
        ids = list(token_ids)
        if self.blackout:
            self._black_out(mask, ids, codec)
        if self.blackout_after_end:
            end = next((i for i, token in enumerate(ids) if token in stop_ids), len(ids))
            mask[end + 1 :] = True
        return mask

    def _black_out(self, mask: npt.NDArray[np.bool_], ids: Sequence[int], codec: TokenCodec) -> None:
        spelled = list(pieces(ids, codec))
        whole = "".join(text for _, _, text in spelled)
        piece_of = [piece for piece in spelled for _ in piece[2]]  # of each character
        for wanted in self.blackout:
            start = whole.find(wanted)
            if start >= 0:
                mask[piece_of[start][0] : piece_of[start + len(wanted) - 1][1]] = True


def sampled_tokens(
    token_ids: Sequence[int], log_probs: Sequence[float], policy_version: int | Sequence[int], *, authors: AuthorTable
) -> TokenSequence:
    """The tokens of a reply with the author of what is sampled; log-probs that are all NaN: of a demonstrator.

    `policy_version`: of all tokens, or one per token. Raises ValueError for what can't have been sampled.
    """
    n, nats = len(token_ids), [*map(float, log_probs)]
    unknown = sum(map(math.isnan, nats))
    if unknown not in (0, n) or any(map(math.isinf, nats)):
        raise ValueError("log_probs must be finite, or all NaN, got something between. Mend what sampled them.")
    if min(token_ids) < 0 or (not unknown and max(nats) > _ROUNDING):
        raise ValueError(
            f"token_ids must not be negative and log_probs not above 0, got {min(token_ids)} and {max(nats):g}. "
            "Mend what sampled them: log-probs are natural logarithms of probabilities."
        )
    versions = np.asarray(NOT_SAMPLED if unknown else policy_version, np.int32)
    return TokenSequence(
        np.array(token_ids, np.int32),
        np.full(n, authors.code(DEMONSTRATION if unknown else LLM), np.uint8),
        np.array(nats, np.float32),
        versions if versions.ndim else np.full(n, versions, np.int32),
    )


def mark_untrained(tokens: TokenSequence, at: npt.NDArray[np.bool_], authors: AuthorTable) -> TokenSequence:
    """The tokens, those `at` under an author that is sampled and not trained."""
    if not at.any():
        return tokens
    codes = tokens.authors.copy()
    for code in np.unique(codes[at & authors.is_trained(codes)]):
        known = authors.has_behavior(np.array([code], np.uint8))[0]
        name = LLM_DO_NOT_TRAIN if known else discarded(authors.name(int(code)))
        codes[at & (codes == code)] = authors.code(name)
    return replace(tokens, authors=codes)


class OpenSegment:
    """What was shown and sampled in one unbroken stretch: each prompt extends the one before."""

    def __init__(self, prompt: TokenSequence, hinted: TokenSequence | None, *, reason: SegmentReason) -> None:
        """The first prompt as it is trained; if the policy sees another one, with a hint, that too."""
        self.reason: SegmentReason = reason
        self.behavior_context: BehaviorContext = "plain" if hinted is None else "hinted"
        self.has_replies = False
        self._ids: list[int] = (prompt if hinted is None else hinted).token_ids.tolist()
        self._parts: list[tuple[TokenSequence, int | None]] = [(prompt, None)]

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """All that the policy has seen and said here."""
        return list(self._ids)

    def show(self, tokens: TokenSequence, *, turn: int | None = None) -> None:
        self._parts.append((tokens, turn))
        self._ids += tokens.token_ids.tolist()

    def say(self, tokens: TokenSequence, *, turn: int | None) -> None:
        """Append a reply. None: it belongs to no turn."""
        if self.behavior_context == "hinted":
            tokens = replace(tokens, behavior_log_probs=np.full(len(tokens), np.nan, np.float32))
        self.show(tokens, turn=turn)
        self.has_replies = True

    def closed(self, control: TrainingControl, num_turns: int, authors: AuthorTable) -> Segment:
        parts = [
            tokens
            if turn is None or control.trains(turn, num_turns)
            else mark_untrained(tokens, np.ones(len(tokens), bool), authors)
            for tokens, turn in self._parts
        ]
        return Segment(TokenSequence.concatenate(parts), self.reason, self.behavior_context)
