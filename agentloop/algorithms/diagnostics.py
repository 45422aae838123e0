"""How far the policy has moved away from its data. Nothing here carries gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentloop.algorithms.log_probs import log_ratios


@dataclass(frozen=True)
class Drift:
    """exp(old_log_probs - behavior_log_probs) over each trajectory's action tokens; all [N] float64."""

    tokens: Tensor
    """Action tokens whose behavior log-prob is known; where this is 0 the other arrays say nothing."""
    sum: Tensor
    max: Tensor
    weight: Tensor
    """exp(mean of the clamped log drift): the trajectory's weight in the effective sample size."""
    kl_sum: Tensor
    """Sum of exp(d) - d - 1 with d = the log drift: estimates KL(behavior || old)."""


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
    mean_log = sum_by_trajectory(log_drift, trajectory, count) / tokens.clamp_min(1)
    highest = torch.where(known, log_drift, -torch.inf).amax(dim=1)
    start = torch.full((count,), -torch.inf, dtype=torch.float64, device=highest.device)
    return Drift(
        tokens=tokens,
        sum=sum_by_trajectory(log_drift.exp() * known, trajectory, count),
        max=start.scatter_reduce(0, trajectory, highest, "amax").exp(),
        weight=mean_log.exp(),
        kl_sum=sum_by_trajectory(log_drift.expm1() - log_drift, trajectory, count),
    )


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / (N sum w^2) of [N] positive weights: 1 when all are equal, 1 / N when one has all."""
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def sum_by_trajectory(values: Tensor, trajectory: Tensor, count: int) -> Tensor:
    """[count] float64: sums of [B, T] values over all rows of each trajectory."""
    total = torch.zeros(count, dtype=torch.float64, device=values.device)
    return total.index_add_(0, trajectory, values.double().sum(dim=1))
