"""Distance to a reference policy: per token, in the rewards and in the loss.

Estimators of KL(policy || reference) from tokens the policy sampled (Schulman 2020, "Approximating KL
divergence"), with d = clamp(log_probs - ref_log_probs, -20, 20) in nats.
"""

from typing import Literal

from torch import Tensor

from agentloop.algorithms.log_probs import log_ratios, require_detached

Estimator = Literal["k1", "k2", "k3"]
KlGradient = Literal["plain", "importance"]

K3_BOUND = 10.0
"""Nats of one token, as in verl's `low_var_kl`."""


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, estimator: Estimator) -> Tensor:
    """Estimate the KL of each token, in nats; 0 outside `mask`.

    - k1: d. Unbiased, may be negative.
    - k2: d^2 / 2. Biased, >= 0; its gradient is that of the KL.
    - k3: min(exp(-d) - 1 + d, 10). Unbiased below the bound, >= 0. Beyond the bound, d < -2.61 or d > 11, it has no
      gradient. Without the bound, which is verl's, one stale token of exp(20) nats would dominate a step.
    """
    d = log_ratios(log_probs, ref_log_probs, mask)
    match estimator:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            return ((-d).expm1() + d).clamp_max(K3_BOUND)


def kl_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    *,
    anchors: Tensor,
    estimator: Estimator,
    gradient: KlGradient,
) -> Tensor:
    """Compute the KL as a loss per token; value and gradient are 0 outside `mask`.

    The gradient of an unbiased estimate is not unbiased, because the distribution of tokens changes too. For tokens
    sampled from the current policy the mean gradient of k1 is 0, that of k2 is the gradient of the KL, and that of k3
    is the gradient of KL(reference || policy).

    - plain: the estimator with its own gradient; k3 is GRPO as published (arXiv 2402.03300).
    - importance: exp(clamp(log_probs - anchors)) x estimator, with the gradient of both. If the policy of `anchors`
      sampled, value and gradient of k1 and k3 are the KL's (DeepSeek-V3.2, arXiv 2512.02556).

    Raises ValueError if reference or anchors require grad.
    """
    require_detached(ref_log_probs=ref_log_probs, anchors=anchors)
    estimate = kl_estimate(log_probs, ref_log_probs, mask, estimator)
    match gradient:
        case "plain":
            return estimate
        case "importance":
            return log_ratios(log_probs, anchors, mask).exp() * estimate
