"""Log-probs of tokens, ratios that stay finite, and how far by them the policy has moved away from its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


LOG_RATIO_BOUND = 20.0
"""Nats. e^20 is still far from the float32 limit; beyond the bound a ratio carries no gradient."""

EssWeights = Literal["mean", "sequence", "token"]


def log_ratios(log_probs: Tensor, anchor_log_probs: Tensor, mask: Tensor) -> Tensor:
    """clamp(log_probs - anchor_log_probs, -20, 20) where `mask`, 0 elsewhere; nats.

    Masked inputs are replaced before the subtraction: a NaN or a wild stored value outside the mask would
    otherwise reach the gradient as 0 x inf.
    """
    zero = torch.zeros((), dtype=log_probs.dtype, device=log_probs.device)
    difference = torch.where(mask, log_probs, zero) - torch.where(mask, anchor_log_probs, zero)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@dataclass(frozen=True)
class Drift:
    """exp(old_log_probs - behavior_log_probs) over each trajectory's action tokens; all [N] float64."""

    tokens: Tensor
    """Action tokens whose behavior log-prob is known; where this is 0 the other arrays say nothing."""
    sum: Tensor
    max: Tensor
    weight: Tensor
    """exp(mean of the clamped log drift): near 1 on long trajectories whatever becomes of their tokens."""
    sequence_weight: Tensor
    """exp(their sum, clamped to 20 nats): the importance weight of the whole trajectory."""
    squares: Tensor
    """Sum of exp(2 d)."""
    kl_sum: Tensor
    """Sum of exp(d) - d - 1 with d = the log drift: estimates KL(behavior || old)."""

    def effective_sample_size(self, trajectories: Tensor, weights: EssWeights) -> float:
        """(sum w)^2 / (n sum w^2) over some trajectories, each with a token, chosen by [N] bool or by their indices.

        n counts trajectories, and w is the geometric mean of a trajectory's ratios (`mean`) or their product
        (`sequence`); or n counts tokens, and w is each one's own ratio (`token`).
        """
        if weights == "token":
            tokens, total, squares = (part[trajectories].sum() for part in (self.tokens, self.sum, self.squares))
            return float(total**2 / (tokens * squares))
        return effective_sample_size((self.weight if weights == "mean" else self.sequence_weight)[trajectories])


def trajectory_drift(
    old_log_probs: Tensor,
    behavior_log_probs: Tensor,
    *,
    response_mask: Tensor,
    trajectory: Tensor,
    count: int,
) -> Drift:
    """Drift of `count` trajectories; `trajectory` [B] is each row's. Unknown log-probs are left out."""
    known = response_mask & ~behavior_log_probs.isnan()
    log_drift = log_ratios(old_log_probs, behavior_log_probs, known).double()
    tokens = sum_by_trajectory(known.double(), trajectory, count)
    sum_log = sum_by_trajectory(log_drift, trajectory, count)
    highest = torch.where(known, log_drift, -torch.inf).amax(dim=1)
    start = torch.full((count,), -torch.inf, dtype=torch.float64, device=highest.device)
    return Drift(
        tokens=tokens,
        sum=sum_by_trajectory(log_drift.exp() * known, trajectory, count),
        max=start.scatter_reduce(0, trajectory, highest, "amax").exp(),
        weight=(sum_log / tokens.clamp_min(1)).exp(),
        sequence_weight=sum_log.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp(),
        squares=sum_by_trajectory((2 * log_drift).exp() * known, trajectory, count),
        kl_sum=sum_by_trajectory(log_drift.expm1() - log_drift, trajectory, count),
    )


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / (N sum w^2) of [N] positive weights: 1 when all are equal, 1 / N when one has all."""
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def sum_by_trajectory(values: Tensor, trajectory: Tensor, count: int) -> Tensor:
    """[count] float64: sums of [B, T] values over all rows of each trajectory."""
    total = torch.zeros(count, dtype=torch.float64, device=values.device)
    return total.index_add_(0, trajectory, values.double().sum(dim=1))
