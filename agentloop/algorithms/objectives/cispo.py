"""CISPO: the weight of a token is bounded, and no token loses its gradient."""

from agentloop.algorithms.declarations import AboveZero, AtLeastZero, Objective
from agentloop.algorithms.objective_input import ObjectiveInput, PolicyLoss, clipped_where


def cispo(inputs: ObjectiveInput, *, ratio_low: AtLeastZero = 0.0, ratio_high: AboveZero = 5.0) -> PolicyLoss:
    """Bound the ratio itself, not its distance from 1; the paper sets no lower bound."""
    ratios = inputs.log_ratios.exp().detach()
    weights = ratios.clamp(ratio_low, ratio_high)
    clipped = (weights != ratios) & (inputs.advantages != 0)
    return clipped_where(-weights * inputs.advantages * inputs.log_probs, clipped)


CISPO = Objective(
    name="cispo",
    paper="MiniMax-M1, arXiv 2506.13585",
    formula="-sg(clip(r, `ratio_low`, `ratio_high`)) A l",
    function=cispo,
)
