"""Behavior cloning: cross-entropy on the trained tokens, whoever wrote them."""

from typing import Literal

from agentloop.algorithms.declarations import AboveZero, Objective
from agentloop.algorithms.objective_input import ObjectiveInput, PolicyLoss, unclipped


def bc(
    inputs: ObjectiveInput, *, coef: AboveZero = 1.0, weighting: Literal["uniform", "advantage"] = "uniform"
) -> PolicyLoss:
    """Imitate all tokens alike (`uniform`), or only those of positive advantage, weighted by it (`advantage`)."""
    weights = inputs.loss_mask.to(inputs.log_probs.dtype) if weighting == "uniform" else inputs.advantages.clamp_min(0)
    return unclipped(-coef * weights * inputs.log_probs)


BC = Objective(
    name="bc",
    paper="cross-entropy",
    formula="-`coef` u l; u = 1, or max(A, 0) with `weighting: advantage`",
    function=bc,
    needs_advantage=False,
    has_ratio=False,
    bounded=False,
    replaces_missing=True,
)
