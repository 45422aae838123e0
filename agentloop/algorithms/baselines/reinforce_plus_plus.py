"""REINFORCE++ in its two forms: a reward minus the batch's or group's mean, divided by the batch's deviation."""

from agentloop.algorithms.advantages import mean_reward
from agentloop.algorithms.declarations import Algorithm

REINFORCE_PLUS_PLUS = Algorithm(
    name="reinforce++",
    paper="Hu 2025, arXiv 2501.03262",
    formula="(r - mean) / (std + 1e-6) over all fresh trajectories of the iteration, whatever their task",
    no_signal="an iteration of equal rewards",
    remark="the paper normalises over tokens; here a trajectory weighs the same however long it is",
    compares="batch",
    baseline=mean_reward,
    divides=True,
)
REINFORCE_PLUS_PLUS_BASELINE = Algorithm(
    name="reinforce++_baseline",
    paper="the same paper's second form",
    formula="r - mean of the group, whitened over all fresh trajectories of the iteration: divided by sqrt(variance + "
    "1e-8)",
    no_signal="a group of equal rewards, which counts in the variance",
    remark="as above",
    compares="group",
    baseline=mean_reward,
    whitens=True,
    credits_turns=False,
)
