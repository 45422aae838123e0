"""Dr. GRPO: a reward minus the mean of its group."""

from agentloop.algorithms.advantages import mean_reward
from agentloop.algorithms.declarations import Algorithm

DR_GRPO = Algorithm(
    name="dr_grpo",
    paper="Liu et al. 2025, arXiv 2503.20783",
    formula="r - mean",
    no_signal="a group of equal rewards",
    remark="the paper also divides token sums by a constant: set `loss.aggregation: seq-mean-token-sum-norm` for that",
    compares="group",
    baseline=mean_reward,
)
