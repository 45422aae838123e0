"""DPPO: a bound on a divergence in place of a clip: the binary total variation or the binary KL.

The divergence is from the anchor's policy to the current one, with two outcomes: this token, or any other. Beyond the
bound, a token is left out if it would lead further away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentloop.algorithms.declarations import AboveZero, AtLeastZero, Objective
from agentloop.algorithms.objective_input import ObjectiveInput, PolicyLoss, clipped_where

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_PROBABILITY = 1e-8
"""The least probability of all other tokens together; anything less counts as this."""


def dppo_tv(
    inputs: ObjectiveInput,
    *,
    divergence_low: AtLeastZero = 0.15,
    divergence_high: AtLeastZero = 0.15,
    ratio_high: AboveZero = 20.0,
) -> PolicyLoss:
    moved = inputs.log_probs.detach().exp() - inputs.anchors.exp()
    return _within(inputs, moved, low=divergence_low, high=divergence_high, ratio_high=ratio_high)


def dppo_kl(
    inputs: ObjectiveInput,
    *,
    divergence_low: AtLeastZero = 0.05,
    divergence_high: AtLeastZero = 0.05,
    ratio_high: AboveZero = 20.0,
) -> PolicyLoss:
    now, then = inputs.log_probs.detach(), inputs.anchors
    others_now, others_then = ((-logs.expm1()).clamp_min(_LEAST_PROBABILITY) for logs in (now, then))
    divergence = then.exp() * (then - now) + others_then * (others_then / others_now).log()
    moved = divergence * (now - then).sign()
    return _within(inputs, moved, low=divergence_low, high=divergence_high, ratio_high=ratio_high)


def _within(inputs: ObjectiveInput, moved: Tensor, *, low: float, high: float, ratio_high: float) -> PolicyLoss:
    """Compute -w A log_prob with w = min(r, ratio_high); 0 where A > 0, `moved` > high or A < 0, `moved` < -low."""
    outside = (moved > high).where(inputs.advantages > 0, moved < -low) & (inputs.advantages != 0)
    weights = inputs.log_ratios.exp().detach().clamp_max(ratio_high)
    loss = -weights * inputs.advantages * inputs.log_probs
    return clipped_where(loss.masked_fill(outside, 0.0), outside)


DPPO_TV = Objective(
    name="dppo_tv",
    paper="arXiv 2602.04879",
    formula="-sg(min(r, `ratio_high`)) A l; 0 where A > 0 and exp(l) - exp(a) > `divergence_high`, or A < 0 and "
    "exp(l) - exp(a) < -`divergence_low`",
    function=dppo_tv,
)
DPPO_KL = Objective(
    name="dppo_kl",
    paper="arXiv 2602.04879",
    formula="-sg(min(r, `ratio_high`)) A l; 0 where D > `divergence_high`, A > 0 and l > a, or D > `divergence_low`, "
    "A < 0 and l < a; with p = exp(l), q = exp(a), D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))",
    function=dppo_kl,
)
