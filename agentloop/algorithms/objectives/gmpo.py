"""Geometric-Mean Policy Optimization: the geometric mean of a trajectory's clipped ratios.

The paper's aggregation is seq-mean-token-mean.
"""

from agentloop.algorithms.declarations import AtLeastZero, Objective
from agentloop.algorithms.objective_input import ObjectiveInput, PolicyLoss, clipped_where


def gmpo(inputs: ObjectiveInput, *, log_ratio_low: AtLeastZero = 0.4, log_ratio_high: AtLeastZero = 0.4) -> PolicyLoss:
    differences, a = inputs.log_ratios, inputs.advantages
    bounded = differences.clamp_max(log_ratio_high).where(a > 0, differences.clamp_min(-log_ratio_low))
    bounded = bounded.masked_fill(a == 0, 0.0)
    clipped = ((bounded != differences) & (a != 0)).detach()
    return clipped_where(-a * inputs.trajectory_mean(bounded).exp(), clipped)


GMPO = Objective(
    name="gmpo",
    paper="arXiv 2507.20673",
    formula="-A exp(mean of min(d, `log_ratio_high`) where A > 0, max(d, -`log_ratio_low`) where A < 0)",
    function=gmpo,
    whole_trajectories=True,
)
