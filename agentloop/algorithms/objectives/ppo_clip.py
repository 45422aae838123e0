"""PPO's clipped surrogate, with a bound on the loss of tokens of negative advantage (the dual clip).

A token has a gradient where A > 0 and r < 1 + clip_high, and where A < 0 and 1 - clip_low < r < dual_clip.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from agentloop.algorithms.declarations import AboveOne, AtLeastZero, BelowOne, Objective
from agentloop.algorithms.objective_input import ObjectiveInput, PolicyLoss, clipped_where

if TYPE_CHECKING:
    from torch import Tensor


def ppo_clip(
    inputs: ObjectiveInput,
    *,
    clip_low: BelowOne = 0.2,
    clip_high: AtLeastZero = 0.28,
    dual_clip: AboveOne | None = 3.0,
) -> PolicyLoss:
    """Compute the clipped loss; if `dual_clip` is None, without a dual clip."""
    ratios = inputs.log_ratios.exp()
    whole = clipped_surrogate(ratios, inputs.advantages, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is None:
        return whole
    # Not -A x dual_clip everywhere: with A >= 0 there is no ceiling.
    ceiling = (-inputs.advantages * dual_clip).masked_fill(~(inputs.advantages < 0), math.inf)
    return PolicyLoss(whole.loss.minimum(ceiling), whole.clipped, (whole.loss > ceiling).detach())


def clipped_surrogate(ratios: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """Compute max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) for any ratios [B, T]."""
    plain = -advantages * ratios
    bounded = -advantages * ratios.clamp(1 - clip_low, 1 + clip_high)
    return clipped_where(plain.maximum(bounded), (bounded > plain).detach())


PPO_CLIP = Objective(
    name="ppo_clip",
    paper="PPO, arXiv 1707.06347; dual clip, 1912.09729; two bounds, DAPO, 2503.14476",
    formula="max(-A r, -A clip(r, 1 - `clip_low`, 1 + `clip_high`)); where A < 0 at most -A `dual_clip`",
    function=ppo_clip,
    replay_defaults={"clip_high": 0.2},
)
