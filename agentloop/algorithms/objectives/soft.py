"""Objectives that bend the ratio smoothly instead of clipping it.

All are A x/(x + c) of some x > 0, which is sigmoid(log x - log c): it saturates where x overflows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agentloop.algorithms.objectives.objective import ObjectiveInput, PolicyLoss, unclipped


def sapo(inputs: ObjectiveInput, *, tau_positive: float, tau_negative: float) -> PolicyLoss:
    """-A f(r), f(r) = (4 / tau) sigmoid(tau (r - 1)) (SAPO, Gao et al. 2025, arXiv 2511.20347).

    tau is tau_positive where A > 0, else tau_negative. The gradient is that of f itself, -A 4 s (1 - s) r with s the
    sigmoid: -A at r = 1, fading on both sides. Weighing log-probs by f would grow with r instead.
    """
    positive = inputs.advantages > 0
    tau = torch.where(positive, tau_positive, tau_negative).to(inputs.log_probs.dtype)
    return unclipped(-inputs.advantages * 4 / tau * _sigmoid(tau * (inputs.log_ratios().exp() - 1)))


def exgrpo(inputs: ObjectiveInput, *, beta: float) -> PolicyLoss:
    """-A w / (w + beta), w = pi / pi_behavior (ExGRPO, Zhan et al. 2025, arXiv 2510.02245).

    The anchor must be `behavior`. Its gradient -A beta w / (w + beta)^2 is largest at w = beta: a large w limits
    itself. At w = 1 and beta = 0.1 it is 0.1 / 1.21 = 0.083 of an unclipped token's.
    """
    return unclipped(-inputs.advantages * _sigmoid(inputs.log_ratios() - math.log(beta)))


def luffy(inputs: ObjectiveInput, *, gamma: float) -> PolicyLoss:
    """-A p / (p + gamma), p = exp(log_prob): a behavior probability of 1 (LUFFY, Yan et al. 2025, arXiv 2504.14945).

    For tokens of which nobody knows how likely their author found them. The gradient -A gamma p / (p + gamma)^2 is
    largest at p = gamma.
    """
    return unclipped(-inputs.advantages * _sigmoid(inputs.log_probs - math.log(gamma)))


def _sigmoid(x: Tensor) -> Tensor:
    """The sigmoid with an exact gradient where it is close to 1: there 1 - s would lose its digits."""
    return torch.where(x > 0, 1 - torch.sigmoid(-x), torch.sigmoid(x))
