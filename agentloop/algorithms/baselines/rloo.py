"""REINFORCE leave-one-out: a reward minus the mean of the others in its group."""

from agentloop.algorithms.advantages import mean_reward
from agentloop.algorithms.declarations import Algorithm

RLOO = Algorithm(
    name="rloo",
    paper="Ahmadian et al. 2024, arXiv 2402.14740",
    formula="r_i - mean of the others",
    no_signal="a group of equal rewards",
    compares="group",
    baseline=mean_reward,
    leaves_itself_out=True,
)
