"""Distance to a reference policy, per token, and its place in the rewards.

Estimators of KL(policy || reference) from tokens the policy sampled (Schulman 2020, "Approximating KL
divergence").
"""

from __future__ import annotations

from torch import Tensor

from agentloop.algorithms.log_probs import log_ratios


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """log_probs - ref_log_probs; nats. Unbiased, may be negative."""
    return log_probs - ref_log_probs


def k3(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = clamp(ref_log_probs - log_probs, -20, 20); nats, >= 0, and 0 outside `mask`."""
    difference = log_ratios(ref_log_probs, log_probs, mask)
    return difference.expm1() - difference


def kl_penalised_rewards(scores: Tensor, kl: Tensor, coef: float) -> Tensor:
    """Token-level rewards: scores - coef x kl; reward units."""
    return scores - coef * kl
