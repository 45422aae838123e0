"""Group Sequence Policy Optimization: PPO's clip with the ratio of a whole trajectory.

This is the paper's token form, s_t = sg(s) exp(d_t - sg(d_t)): its value is s, and each token may have an advantage of
its own. If all are equal, the gradient is that of s. The paper's aggregation is seq-mean-token-mean.
"""

from agentloop.algorithms.declarations import AtLeastZero, BelowOne, Objective
from agentloop.algorithms.objective_input import ObjectiveInput, PolicyLoss
from agentloop.algorithms.objectives.ppo_clip import clipped_surrogate


def gspo(inputs: ObjectiveInput, *, clip_low: BelowOne = 3e-4, clip_high: AtLeastZero = 4e-4) -> PolicyLoss:
    differences = inputs.log_ratios
    mean = inputs.trajectory_mean(differences.detach())
    ratios = (mean + differences - differences.detach()).exp()
    return clipped_surrogate(ratios, inputs.advantages, clip_low=clip_low, clip_high=clip_high)


GSPO = Objective(
    name="gspo",
    paper="arXiv 2507.18071",
    formula="as ppo_clip with s = exp(mean d) in the place of r",
    function=gspo,
    whole_trajectories=True,
)
