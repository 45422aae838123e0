"""Which sampled tokens are kept out of training: whole turns, and stretches within a reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from context.authors import LLM_DO_NOT_TRAIN, AuthorTable, discarded
from context.tokens.codec import TokenCodec
from context.tokens.token_sequence import TokenSequence


@dataclass(frozen=True)
class TrainingControl:
    """Withheld tokens stay sampled tokens, with their log-probs; they only carry no loss."""

    keep_turns: tuple[int, ...] | None = None
    """The only turns to train; None: all. Turns count from 0, negative ones from the end of the episode."""
    discard_turns: tuple[int, ...] = ()
    """Turns not to train, kept or not."""
    blackout: tuple[str, ...] = ()
    """Template texts whose first occurrence in each reply is not trained."""
    blackout_after_end: bool = False
    """Nothing behind a reply's first stop token is trained; the stop token is."""

    def __post_init__(self) -> None:
        if not all(self.blackout):
            raise ValueError("blackout must hold texts of at least one character, got ''. Remove it.")

    def trains(self, turn: int, num_turns: int) -> bool:
        named = {turn, turn - num_turns}
        kept = self.keep_turns is None or not named.isdisjoint(self.keep_turns)
        return kept and named.isdisjoint(self.discard_turns)

    def withheld(self, token_ids: Sequence[int], codec: TokenCodec, stop_ids: frozenset[int]) -> npt.NDArray[np.bool_]:
        """[T] True = a rule of this control keeps the token of this reply out of training."""
        mask = np.zeros(len(token_ids), bool)
        ids = list(token_ids)
        for text in self.blackout:
            wanted = codec.encode(text)
            first = next((i for i in range(len(ids)) if ids[i : i + len(wanted)] == wanted), None)
            if first is not None:
                mask[first : first + len(wanted)] = True
        if self.blackout_after_end:
            end = next((i for i, token in enumerate(ids) if token in stop_ids), len(ids))
            mask[end + 1 :] = True
        return mask


def withhold(tokens: TokenSequence, at: npt.NDArray[np.bool_], authors: AuthorTable) -> TokenSequence:
    """The tokens, those `at` under an author that is sampled and not trained."""
    codes = tokens.authors.copy()
    for code in np.unique(codes[at & authors.is_trained(codes)]):
        known = authors.has_behavior(np.array([code], np.uint8))[0]
        name = LLM_DO_NOT_TRAIN if known else discarded(authors.name(int(code)))
        codes[at & (codes == code)] = authors.code(name)
    return replace(tokens, authors=codes)
