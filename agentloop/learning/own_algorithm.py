"""Loads algorithms of the user's own: an objective or an advantage that is a function in the user's file.

docs/add-an-algorithm.md shows both.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from agentloop.algorithms.declarations import Member
from agentloop.algorithms.objective_input import ObjectiveInput, PolicyLoss, TokenLoss, unclipped
from agentloop.errors import UserError
from agentloop.user_code import failing_as, load_function

OwnAdvantage = Callable[[Sequence[Member]], list[float]]
"""Advantages of the members that are compared with each other."""


def load_own_objective(spec: str, options: Mapping[str, Any], *, what: str) -> TokenLoss:
    """The function that `spec` names: it takes an ObjectiveInput and the options, and returns a loss per token or a
    PolicyLoss. `what` is the config path that errors start with.

    Its loss outside the mask is dropped. Raises UserError if there is no such function, if it returns anything else,
    and for its own exceptions.
    """
    function = load_function(spec, what=what)
    name = f"{what} ({function.__name__})"

    def objective(inputs: ObjectiveInput) -> PolicyLoss:
        with failing_as(f"{name} must take an ObjectiveInput and its options, got", ". Mend it."):
            found = function(inputs, **options)
        result = unclipped(found) if isinstance(found, Tensor) else found
        shape = inputs.loss_mask.shape
        parts = [result.loss, result.clipped, result.clipped_lower] if isinstance(result, PolicyLoss) else []
        if not parts or any(not isinstance(part, Tensor) or part.shape != shape for part in parts):
            got = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise UserError(f"{name} must return a loss per token, a [B, T] tensor, or a PolicyLoss, got {got}.")
        zero = torch.zeros_like(inputs.log_probs)
        constant = inputs.log_probs.requires_grad and not result.loss.requires_grad
        if constant and bool((result.loss[inputs.loss_mask] != 0).any()):
            raise UserError(
                f"{name} must return a loss with a gradient, got a constant. Compute it from inputs.log_probs, without "
                "detach, item or numpy."
            )
        return PolicyLoss(
            torch.where(inputs.loss_mask, result.loss.to(zero.dtype), zero),
            result.clipped.bool() & inputs.loss_mask,
            result.clipped_lower.bool() & inputs.loss_mask,
        )

    return objective


def load_own_advantage(spec: str) -> OwnAdvantage:
    """The function of `advantage.function`, tried once on three made-up members. Raises UserError if it fails."""
    function = load_function(spec, what="advantage.function")

    def advantage(members: Sequence[Member]) -> list[float]:
        rule = "advantage.function must take the members of a group and return one finite number per member "
        rule, advice = f"{rule}({len(members)}), got", f" from {function.__name__}. Mend it."
        with failing_as(rule, advice):
            given = [float(value) for value in function(list(members))]
        if len(given) != len(members) or not all(map(math.isfinite, given)):
            raise UserError(f"{rule} {given}{advice}")
        return given

    advantage([Member(reward, 4, "group", "task") for reward in (0.0, 1.0, 1.0)])
    return advantage
