"""The losses that the configuration names, one for each stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agentloop.algorithms.heterogeneous import StreamLoss
from agentloop.algorithms.objectives import OBJECTIVES, Objective, ObjectiveInput, PolicyLoss, unclipped
from agentloop.config.sections.loss import LossSection, OwnObjective, PlainMissing, StreamLossSection
from agentloop.errors import UserError
from agentloop.user_code import failing_as, load_function

Losses = dict[str, StreamLoss]
"""By the names of their sections: fresh, replay and, where it is configured, hinted."""


def stream_losses(section: LossSection) -> Losses:
    """Runs the files of objectives of one's own. Raises UserError for a file or function that is not there."""
    return {name: _stream_loss(f"loss.{name}", part) for name, part in section.parts().items()}


def _stream_loss(where: str, section: StreamLossSection) -> StreamLoss:
    objective, missing = section.objective, section.missing_log_probs
    if isinstance(objective, OwnObjective):
        function = load_function(objective.name, what=f"{where}.objective")
        # Nobody knows what it looks at: it sees whole trajectories, and every row with a trained token.
        own = _own(function, dict(objective.options), where)
        built = StreamLoss(own, section.anchor, whole_trajectories=True, needs_advantage=False)
    else:
        kind = OBJECTIVES[objective.name]
        built = StreamLoss(
            partial(kind.function, **objective.model_dump(exclude={"name"})),
            section.anchor,
            whole_trajectories=kind.whole_trajectories,
            needs_advantage=kind.needs_advantage,
        )
    if isinstance(missing, PlainMissing):
        return built
    other = OBJECTIVES[missing.name]
    return replace(
        built,
        missing=partial(other.function, **missing.model_dump(exclude={"name"})),
        needs_advantage=built.needs_advantage and other.needs_advantage,
    )


def _own(function: Callable[..., Any], options: dict[str, Any], where: str) -> Objective:
    """`function` of the user's file: takes an ObjectiveInput and `options`, returns a loss per token or a PolicyLoss.

    Its loss outside the mask is dropped. Raises UserError for anything else it returns, and for its own exceptions.
    """
    name = f"{where}.objective ({function.__name__})"

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
