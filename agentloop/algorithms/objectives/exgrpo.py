"""ExGRPO: the ratio w to the behavior policy becomes w / (w + beta), which limits large ratios.

The gradient -A beta w / (w + beta)^2 is largest at w = beta. At w = 1 and beta = 0.1 it is 0.1 / 1.21 = 0.083 of an
unclipped token's.
"""

import math

from agentloop.algorithms.declarations import AboveZero, Objective
from agentloop.algorithms.objective_input import ObjectiveInput, PolicyLoss, exact_sigmoid, unclipped


def exgrpo(inputs: ObjectiveInput, *, beta: AboveZero = 0.1) -> PolicyLoss:
    return unclipped(-inputs.advantages * exact_sigmoid(inputs.log_ratios - math.log(beta)))


EXGRPO = Objective(
    name="exgrpo",
    paper="arXiv 2510.02245",
    formula="-A w / (w + `beta`), w = exp(clamp(l - behavior)); needs anchor `behavior`",
    function=exgrpo,
    anchor="behavior",
)
