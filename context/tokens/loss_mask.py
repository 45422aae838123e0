"""Decides which tokens are trained: masks that follow from the tokens' authors, and exceptions.

    tokens           <|user|>   Which code?   <|assistant|>   It is 78.   <|end|>
    authors          template   user          template        llm         llm
    response_mask    False      False         False           True        True
    loss_mask        False      False         False           True        True

A sampled token that must not be trained gets an author that is sampled and not trained, such as `llm(do_not_train)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from context.authors import LLM_DO_NOT_TRAIN, AuthorTable, discarded
from context.tokens.codec import TokenCodec
from context.tokens.token_sequence import TokenSequence, pieces


def response_mask(tokens: TokenSequence, table: AuthorTable) -> npt.NDArray[np.bool_]:
    """[T] True = action token: sampled by the policy, a teacher or a demonstrator."""
    return table.is_action(tokens.authors)


def loss_mask(tokens: TokenSequence, table: AuthorTable) -> npt.NDArray[np.bool_]:
    """[T] True = trained on. The mask is always within `response_mask`."""
    return table.is_trained(tokens.authors)


def runs_of(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Find the maximal runs of True, each as [start, end)."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


@dataclass(frozen=True)
class TrainingControl:
    """Keeps sampled tokens out of training. They stay sampled tokens with their log-probs, and carry no loss."""

    keep_turns: tuple[int, ...] | None = None
    """The only turns to train. None: all turns. Turns count from 0, and negative ones from the end of the episode."""
    discard_turns: tuple[int, ...] = ()
    """Turns that are not trained, even where `keep_turns` names them."""
    blackout: tuple[str, ...] = ()
    """Texts whose first occurrence in each reply is not trained, whichever tokens spell it."""
    blackout_after_end: bool = True
    """Nothing behind a reply's first stop token is trained. The stop token itself is."""

    def __post_init__(self) -> None:
        if not all(self.blackout):
            raise ValueError("blackout must hold texts of at least one character, got ''. Remove it.")

    def trains(self, turn: int, num_turns: int) -> bool:
        named = {turn, turn - num_turns}
        kept = self.keep_turns is None or not named.isdisjoint(self.keep_turns)
        return kept and named.isdisjoint(self.discard_turns)

    def untrained(self, token_ids: Sequence[int], codec: TokenCodec, stop_ids: frozenset[int]) -> npt.NDArray[np.bool_]:
        """[T] True = the token of this reply is kept out of training."""
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
        piece_of = [piece for piece in spelled for _ in piece[2]]  # the piece of each character
        for wanted in self.blackout:
            start = whole.find(wanted)
            if start >= 0:
                mask[piece_of[start][0] : piece_of[start + len(wanted) - 1][1]] = True


def mark_untrained(tokens: TokenSequence, at: npt.NDArray[np.bool_], authors: AuthorTable) -> TokenSequence:
    """The tokens with an author that is sampled and not trained where `at` is True."""
    if not at.any():
        return tokens
    codes = tokens.authors.copy()
    for code in np.unique(codes[at & authors.is_trained(codes)]):
        known = authors.has_behavior(np.array([code], np.uint8))[0]
        name = LLM_DO_NOT_TRAIN if known else discarded(authors.name(int(code)))
        codes[at & (codes == code)] = authors.code(name)
    return replace(tokens, authors=codes)
