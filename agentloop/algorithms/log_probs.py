"""Log-probs of tokens: the next-token shift, and the softmax at a temperature."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LOWEST_SCORE = -1e4  # a probability that underflows to 0 has a log of -inf; its product must count as 0


@dataclass(frozen=True)
class Predictions:
    """Which logits predict which tokens, row by row and left to right."""

    rows: Tensor
    """[N] int64"""
    tokens: Tensor
    """[N] int64: position t of the predicted token."""
    sources: Tensor
    """[N] int64: position of the logits that predict it."""
    columns: Tensor
    """[C] int64: the different positions among `sources`, ascending."""


def predictions(response_mask: Tensor) -> Predictions:
    """The next-token shift, and the only place where it happens: token t is predicted by the logits at t - 1.

    Raises ValueError if the first token of a row is an action token, which nothing predicts.
    """
    if bool(response_mask[:, :1].any()):
        raise ValueError(
            "response_mask must be False at position 0, got an action token. Begin every row with a prompt."
        )
    rows, tokens = response_mask.nonzero(as_tuple=True)
    columns = response_mask.any(dim=0).nonzero()[:, 0]
    return Predictions(rows, tokens, sources=tokens - 1, columns=columns - 1)


def log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(logits / temperature) of [N, V] logits at [N] temperatures, in float32 or better; nats."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(precise / temperature[:, None], dim=-1)


def entropies(scores: Tensor) -> Tensor:
    """-sum p log p of [N, V] log-probabilities; nats."""
    return -(scores.exp() * scores.clamp_min(_LOWEST_SCORE)).sum(dim=-1)
