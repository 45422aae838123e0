"""REINFORCE: the reward itself as the advantage, and the log-prob weighed by the advantage as the objective.

The objective has no ratio: rows of another policy are trained as if the current one had sampled them.
"""

from agentloop.algorithms.declarations import Algorithm, Member, Objective
from agentloop.algorithms.objective_input import ObjectiveInput, PolicyLoss, unclipped


def reward_itself(member: Member) -> float:
    return member.reward


def reinforce(inputs: ObjectiveInput) -> PolicyLoss:
    return unclipped(-inputs.advantages * inputs.log_probs)


REINFORCE = Algorithm(
    name="reinforce",
    paper="Williams 1992",
    formula="r",
    no_signal="a reward of 0",
    remark="no baseline: equal rewards teach, too",
    compares="nothing",
    advantage_of=reward_itself,
)
REINFORCE_OBJECTIVE = Objective(
    name="reinforce", paper="Williams 1992", formula="-A l", function=reinforce, has_ratio=False, bounded=False
)
