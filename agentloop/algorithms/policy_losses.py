"""Policy-gradient losses per token, before aggregation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """One loss and two flags per token; every array has the shape of the ratios."""

    loss: Tensor
    """Carries gradient."""
    clipped: Tensor
    """bool: the clip range decided the loss."""
    clipped_lower: Tensor
    """bool: the dual clip decided the loss; only where the advantage is negative."""


def ppo_clip(
    ratios: Tensor, advantages: Tensor, *, clip_low: Tensor, clip_high: Tensor, dual_clip: Tensor
) -> PolicyLoss:
    """PPO's clipped surrogate with a lower bound (Schulman et al. 2017, arXiv 1707.06347; dual clip: Ye et
    al. 2020, arXiv 1912.09729).

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where A < 0 at most -A dual_clip; infinity turns
    the dual clip off. Gradient remains where A > 0 and r < 1 + clip_high, and where A < 0 and 1 - clip_low <
    r < dual_clip. With A = 0 the loss is 0 and has no gradient. Bounds broadcast against the ratios, so that
    rows can differ.
    """
    plain = -advantages * ratios
    bounded = -advantages * torch.minimum(torch.maximum(ratios, 1 - clip_low), 1 + clip_high)
    loss = torch.maximum(plain, bounded)
    # Not -A x dual_clip everywhere: with A = 0 and the dual clip off that would be 0 x inf.
    ceiling = torch.where(advantages < 0, -advantages * dual_clip, torch.inf)
    return PolicyLoss(
        loss=torch.minimum(loss, ceiling),
        clipped=(bounded > plain).detach(),
        clipped_lower=(loss > ceiling).detach(),
    )
