"""The surrogate that Trust Region Policy Optimization maximises, without its constraint."""

from agentloop.algorithms.declarations import Objective
from agentloop.algorithms.objective_input import ObjectiveInput, PolicyLoss, unclipped


def surrogate(inputs: ObjectiveInput) -> PolicyLoss:
    return unclipped(-inputs.advantages * inputs.log_ratios.exp())


SURROGATE = Objective(
    name="surrogate", paper="TRPO, arXiv 1502.05477", formula="-A r", function=surrogate, bounded=False
)
