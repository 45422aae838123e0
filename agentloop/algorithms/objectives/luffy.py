"""LUFFY: an objective for tokens whose behavior probability is unknown.

The gradient -A gamma p / (p + gamma)^2 is largest at p = gamma.
"""

import math

from agentloop.algorithms.declarations import AboveZero, Objective
from agentloop.algorithms.objective_input import ObjectiveInput, PolicyLoss, exact_sigmoid, unclipped


def luffy(inputs: ObjectiveInput, *, gamma: AboveZero = 0.1) -> PolicyLoss:
    return unclipped(-inputs.advantages * exact_sigmoid(inputs.log_probs - math.log(gamma)))


LUFFY = Objective(
    name="luffy",
    paper="arXiv 2504.14945",
    formula="-A p / (p + `gamma`), p = exp(l): a behavior probability of 1",
    function=luffy,
    has_ratio=False,
    bounded=False,
    replaces_missing=True,
)
