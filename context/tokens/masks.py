"""Masks are set expressions over authors, and nothing else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from context.authors import AuthorTable
from context.tokens.token_sequence import TokenSequence


def response_mask(tokens: TokenSequence, table: AuthorTable) -> npt.NDArray[np.bool_]:
    """[T] True = action token: sampled by the policy, a teacher or a demonstrator."""
    return table.is_action(tokens.authors)


def loss_mask(tokens: TokenSequence, table: AuthorTable) -> npt.NDArray[np.bool_]:
    """[T] True = trained on. Always within `response_mask`."""
    return table.is_trained(tokens.authors)
