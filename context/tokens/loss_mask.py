"""Decides which tokens are trained: masks that follow from the tokens' authors, and exceptions.

    tokens           <|user|>   Which code?   <|assistant|>   It is 78.   <|end|>
    authors          template   user          template        llm         llm
    response_mask    False      False         False           True        True
    loss_mask        False      False         False           True        True

A sampled token that must not be trained gets an author that is sampled and not trained, such as `llm(do_not_train)`.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from context.authors import LLM_DO_NOT_TRAIN, AuthorTable, discarded
from context.tokens.token_sequence import TokenSequence


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


def behind_the_end(token_ids: Sequence[int], end_ids: frozenset[int]) -> npt.NDArray[np.bool_]:
    """[T] True = behind the first stop token of a reply. Such a token is not trained; the stop token itself is."""
    ends = np.isin(token_ids, list(end_ids)).cumsum()
    return np.concatenate([[False], ends[:-1] > 0])


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
