"""Objectives that weigh the log-prob of a token; their gradient is that weight times the score function."""

from __future__ import annotations

import math
from typing import Literal

import torch

from agentloop.algorithms.objectives.objective import ObjectiveInput, PolicyLoss, unclipped


def reinforce(inputs: ObjectiveInput) -> PolicyLoss:
    """-A log_prob (Williams 1992). Summed or averaged over tokens as the aggregation says: the paper sums.

    Knows no ratio: rows of another policy are taken as if the current one had sampled them.
    """
    return unclipped(-inputs.advantages * inputs.log_probs)


def gpg(inputs: ObjectiveInput) -> PolicyLoss:
    """-a A log_prob (GPG, Chu et al. 2025, arXiv 2504.02546), a = 1 / the share of trajectories with a signal.

    A group of equal rewards has no gradient and still counts in the denominators; `a` gives back what it takes. It is
    counted over the stream's trajectories of the whole optimizer step, so it does not depend on the micro-batches.
    """
    return unclipped(-inputs.advantages * inputs.log_probs / inputs.signal_share[:, None].to(inputs.log_probs.dtype))


def topr(inputs: ObjectiveInput, *, ratio_high: float) -> PolicyLoss:
    """-w A log_prob, w = 1 where A >= 0, else min(R, ratio_high) without gradient, R the ratio of the whole trajectory
    (Tapered Off-Policy REINFORCE, Le Roux et al. 2025, arXiv 2503.14286).

    R = exp(sum of the trajectory's log-ratios), a product of tokens as in the paper: what the policy hardly does any
    more is not pushed down further.
    """
    log_weights = inputs.trajectory_sum(inputs.log_ratios().detach())
    negative = inputs.advantages < 0
    weights = torch.where(negative, log_weights.clamp_max(math.log(ratio_high)).exp(), torch.ones_like(log_weights))
    clipped = negative & (log_weights > math.log(ratio_high))
    return PolicyLoss(-weights * inputs.advantages * inputs.log_probs, clipped, torch.zeros_like(clipped))


def bc(inputs: ObjectiveInput, *, coef: float, weighting: Literal["uniform", "advantage"]) -> PolicyLoss:
    """-coef u log_prob: behavior cloning, cross-entropy on what the rows hold.

    u = 1 (`uniform`), whatever the advantage, or max(A, 0) (`advantage`): failures are then not imitated. Knows no
    ratio and no behavior policy.
    """
    weights = inputs.loss_mask.to(inputs.log_probs.dtype) if weighting == "uniform" else inputs.advantages.clamp_min(0)
    return unclipped(-coef * weights * inputs.log_probs)
