"""Tapered Off-Policy REINFORCE: a bad reply that the policy would hardly write any more is not pushed down further.

The ratio is the product over the whole trajectory, as in the paper.
"""

import math

from agentloop.algorithms.declarations import AboveZero, Objective
from agentloop.algorithms.objective_input import ObjectiveInput, PolicyLoss, clipped_where


def topr(inputs: ObjectiveInput, *, ratio_high: AboveZero = 1.0) -> PolicyLoss:
    log_weights = inputs.trajectory_sum(inputs.log_ratios.detach())
    negative = inputs.advantages < 0
    weights = log_weights.clamp_max(math.log(ratio_high)).exp().where(negative, log_weights.new_ones(()))
    clipped = negative & (log_weights > math.log(ratio_high))
    return clipped_where(-weights * inputs.advantages * inputs.log_probs, clipped)


TOPR = Objective(
    name="topr",
    paper="arXiv 2503.14286",
    formula="-sg(w) A l; w = 1 where A >= 0, else min(exp(sum d), `ratio_high`)",
    function=topr,
    whole_trajectories=True,
)
