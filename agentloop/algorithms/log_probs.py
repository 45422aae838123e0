"""Log-probs of tokens, and ratios of them that stay finite."""

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
    """Shift by one token, here and nowhere else: token t is predicted by the logits at t - 1.

    Raises ValueError if the first token of a row is an action token, which nothing predicts.
    """
    if bool(response_mask[:, :1].any()):
        raise ValueError("response_mask must be False at position 0, got an action token. Begin rows with a prompt.")
    rows, tokens = response_mask.nonzero(as_tuple=True)
    columns = response_mask.any(dim=0).nonzero()[:, 0]
    return Predictions(rows, tokens, sources=tokens - 1, columns=columns - 1)


def log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """Compute log softmax(logits / temperature) of [N, V] logits at [N] temperatures, in float32 or better; nats."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(precise / temperature[:, None], dim=-1)


def entropies(scores: Tensor) -> Tensor:
    """Compute the entropy -sum p log p of [N, V] log-probabilities; nats."""
    return -(scores.exp() * scores.clamp_min(_LOWEST_SCORE)).sum(dim=-1)


LOG_RATIO_BOUND = 20.0
"""Nats. e^20 is still far from the float32 limit; beyond the bound a ratio carries no gradient."""


def log_ratios(log_probs: Tensor, anchor_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Compute clamp(log_probs - anchor_log_probs, -20, 20) where `mask`, 0 elsewhere; nats.

    Masked inputs are replaced before the subtraction: a NaN or a wild stored value outside the mask would
    otherwise reach the gradient as 0 x inf.
    """
    zero = torch.zeros((), dtype=log_probs.dtype, device=log_probs.device)
    difference = torch.where(mask, log_probs, zero) - torch.where(mask, anchor_log_probs, zero)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def require_detached(**tensors: Tensor) -> None:
    """Raise ValueError for a tensor that requires grad: a gradient through it would be another objective."""
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            raise ValueError(f"{name} must be detached, got a tensor that requires grad. Call .detach() on it.")


def sum_by_trajectory(values: Tensor, trajectory: Tensor, count: int) -> Tensor:
    """Sum [..., B, T] values over all rows of each trajectory, to [..., count] float64."""
    sums = values.double().sum(dim=-1)
    return sums.new_zeros(*sums.shape[:-1], count).index_add_(-1, trajectory, sums)
