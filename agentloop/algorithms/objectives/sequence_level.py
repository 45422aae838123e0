"""Objectives of the ratio of a whole trajectory, over all its rows: they must see them in one pass."""

from __future__ import annotations

import torch

from agentloop.algorithms.objectives.objective import ObjectiveInput, PolicyLoss
from agentloop.algorithms.objectives.token_level import clipped_surrogate


def gspo(inputs: ObjectiveInput, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(mean of the trajectory's log-ratios) (GSPO, Zheng et
    al. 2025, arXiv 2507.18071).

    In the paper's token form: s_t = sg(s) exp(d_t - sg(d_t)), of equal value, lets every token have its own
    advantage, and has the same gradient where all are equal. The paper's average is seq-mean-token-mean.
    """
    differences = inputs.log_ratios()
    mean = inputs.trajectory_mean(differences.detach())
    ratios = (mean + differences - differences.detach()).exp()
    return clipped_surrogate(ratios, inputs.advantages, clip_low=clip_low, clip_high=clip_high)


def gmpo(inputs: ObjectiveInput, *, log_ratio_low: float, log_ratio_high: float) -> PolicyLoss:
    """-A g, g = exp(mean of the trajectory's clipped log-ratios) (GMPO, Zhao et al. 2025, arXiv 2507.20673).

    A log-ratio d is min(d, log_ratio_high) where A > 0, max(d, -log_ratio_low) where A < 0, and 0 where A = 0: a
    geometric mean of PPO's clipped tokens. The paper's average is seq-mean-token-mean.
    """
    differences, a = inputs.log_ratios(), inputs.advantages
    bounded = torch.where(a > 0, differences.clamp_max(log_ratio_high), differences.clamp_min(-log_ratio_low))
    bounded = torch.where(a == 0, torch.zeros_like(bounded), bounded)
    clipped = ((bounded != differences) & (a != 0)).detach()
    loss = -a * inputs.trajectory_mean(bounded).exp()
    return PolicyLoss(loss, clipped, torch.zeros_like(clipped))
