"""Objectives of the ratio r = exp(clamp(log_probs - anchors)), token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from agentloop.algorithms.objectives.objective import ObjectiveInput, PolicyLoss, unclipped

_LEAST_PROBABILITY = 1e-8


def surrogate(inputs: ObjectiveInput) -> PolicyLoss:
    """-A r: the surrogate that TRPO maximises (Schulman et al. 2015, arXiv 1502.05477), without its constraint."""
    return unclipped(-inputs.advantages * inputs.log_ratios().exp())


def ppo_clip(inputs: ObjectiveInput, *, clip_low: float, clip_high: float, dual_clip: float | None) -> PolicyLoss:
    """PPO's clipped surrogate with a lower bound (Schulman et al. 2017, arXiv 1707.06347; dual clip: Ye et al. 2020,
    arXiv 1912.09729).

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where A < 0 at most -A dual_clip; None turns the dual clip
    off. Gradient remains where A > 0 and r < 1 + clip_high, and where A < 0 and 1 - clip_low < r < dual_clip.
    """
    ratios = inputs.log_ratios().exp()
    whole = clipped_surrogate(ratios, inputs.advantages, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is None:
        return whole
    # Not -A x dual_clip everywhere: with A >= 0 there is no ceiling.
    ceiling = torch.where(inputs.advantages < 0, -inputs.advantages * dual_clip, torch.inf)
    return PolicyLoss(torch.minimum(whole.loss, ceiling), whole.clipped, (whole.loss > ceiling).detach())


def clipped_surrogate(ratios: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) of any [B, T] ratios."""
    plain = -advantages * ratios
    bounded = -advantages * ratios.clamp(1 - clip_low, 1 + clip_high)
    clipped = (bounded > plain).detach()
    return PolicyLoss(torch.maximum(plain, bounded), clipped, torch.zeros_like(clipped))


def cispo(inputs: ObjectiveInput, *, ratio_low: float, ratio_high: float) -> PolicyLoss:
    """-w A log_prob with w = clip(r, ratio_low, ratio_high) without gradient (CISPO, MiniMax 2025, arXiv 2506.13585).

    The weight is bounded and no token loses its gradient. The bounds are those of the ratio itself, not of its
    distance from 1; the paper sets no lower one.
    """
    ratios = inputs.log_ratios().exp().detach()
    weights = ratios.clamp(ratio_low, ratio_high)
    clipped = (weights != ratios) & (inputs.advantages != 0)
    return PolicyLoss(-weights * inputs.advantages * inputs.log_probs, clipped, torch.zeros_like(clipped))


def dppo_tv(inputs: ObjectiveInput, *, divergence_low: float, divergence_high: float, ratio_high: float) -> PolicyLoss:
    """-w A log_prob inside the trust region, 0 outside, w = min(r, ratio_high) without gradient (DPPO with the binary
    total variation, Qi et al. 2026, arXiv 2602.04879).

    With p and q the probabilities under log_probs and anchors: a token is outside where A > 0 and p - q >
    divergence_high, or A < 0 and p - q < -divergence_low: what would lead further away is left out, and what leads
    back is not. |p - q| is the total variation between "this token" and "any other".
    """
    moved = inputs.log_probs.detach().exp() - inputs.anchors.exp()
    return _within(inputs, moved, low=divergence_low, high=divergence_high, ratio_high=ratio_high)


def dppo_kl(inputs: ObjectiveInput, *, divergence_low: float, divergence_high: float, ratio_high: float) -> PolicyLoss:
    """`dppo_tv` with the binary KL divergence (the same paper).

    A token is outside where its divergence q log(q / p) + (1 - q) log((1 - q) / (1 - p)), that of "this token" and "any
    other" from the anchor's policy to the current one, is over divergence_high with A > 0 and p > q, or over
    divergence_low with A < 0 and p < q. Probabilities of other tokens below 1e-8 count as 1e-8.
    """
    now, then = inputs.log_probs.detach(), inputs.anchors
    others_now, others_then = ((-logs.expm1()).clamp_min(_LEAST_PROBABILITY) for logs in (now, then))
    divergence = then.exp() * (then - now) + others_then * (others_then / others_now).log()
    moved = divergence * (now - then).sign()
    return _within(inputs, moved, low=divergence_low, high=divergence_high, ratio_high=ratio_high)


def _within(inputs: ObjectiveInput, moved: Tensor, *, low: float, high: float, ratio_high: float) -> PolicyLoss:
    """-w A log_prob but where A > 0 and `moved` > high, or A < 0 and `moved` < -low; w = min(r, ratio_high)."""
    outside = torch.where(inputs.advantages > 0, moved > high, moved < -low)
    outside &= inputs.advantages != 0
    weights = inputs.log_ratios().exp().detach().clamp_max(ratio_high)
    loss = -weights * inputs.advantages * inputs.log_probs
    return PolicyLoss(torch.where(outside, torch.zeros_like(loss), loss), outside, torch.zeros_like(outside))
