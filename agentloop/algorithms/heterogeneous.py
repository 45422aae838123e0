"""One loss for two streams: fresh and replayed rows, each with its own anchor and its own objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentloop.algorithms.objectives import Objective, ObjectiveInput, PolicyLoss

Anchor = Literal["old", "behavior"]


@dataclass(frozen=True)
class StreamLoss:
    """What the rows of one stream are trained with."""

    objective: Objective
    missing: Objective | None = None
    """For the tokens whose behavior policy is unknown; None: `objective` as for all others."""
    whole_trajectories: bool = False
    """All rows of a trajectory must be in one pass."""
    needs_advantage: bool = True
    """A token of advantage 0 has neither loss nor gradient."""


@dataclass(frozen=True)
class HeterogeneousLoss:
    """Per token, [B, T]; 0 (ratio 1) outside the loss mask."""

    policy: PolicyLoss
    log_ratios: Tensor
    """Nats, clamped, against the anchor; without gradient."""


def anchor_log_probs(
    old_log_probs: Tensor, behavior_log_probs: Tensor, *, replay_mask: Tensor, fresh: Anchor, replay: Anchor
) -> Tensor:
    """The denominator of each row's ratio, [B, T] nats: `old` or `behavior`, chosen per stream.

    Where the behavior policy is unknown, the old log-probs stand in for it: the ratio is 1 until the weights change.
    Whether such a token may be trained at all is for the caller to say.
    """
    behavior_rows = torch.where(replay_mask, replay == "behavior", fresh == "behavior")
    chosen = behavior_rows[:, None] & behavior_log_probs.isfinite()
    return torch.where(chosen, behavior_log_probs.to(old_log_probs.dtype), old_log_probs)


def heterogeneous_loss(
    inputs: ObjectiveInput,
    *,
    replay_mask: Tensor,
    fresh: StreamLoss,
    replay: StreamLoss,
    importance_weights: Tensor | None = None,
) -> HeterogeneousLoss:
    """Each row by the objective of its stream, which is given that stream's rows alone, times its importance weights.

    Raises ValueError if the weights require grad: a gradient through them would be another objective.
    """
    loss = torch.zeros_like(inputs.log_probs)
    clipped, lower = torch.zeros_like(inputs.loss_mask), torch.zeros_like(inputs.loss_mask)
    for replayed, stream in ((False, fresh), (True, replay)):
        positions = (replay_mask == replayed).nonzero()[:, 0]
        if len(positions):
            part = _stream_loss(inputs.rows(positions), stream)
            loss = loss.index_copy(0, positions, part.loss)
            clipped[positions], lower[positions] = part.clipped, part.clipped_lower
    if importance_weights is not None:
        if importance_weights.requires_grad:
            raise ValueError("importance_weights must be detached, got a tensor that requires grad. Call .detach().")
        loss = loss * torch.where(inputs.loss_mask, importance_weights.to(loss.dtype), 0.0)
    return HeterogeneousLoss(PolicyLoss(loss, clipped, lower), inputs.log_ratios().detach())


def _stream_loss(inputs: ObjectiveInput, stream: StreamLoss) -> PolicyLoss:
    if stream.missing is None:
        return stream.objective(inputs)
    known = inputs.behavior_log_probs.isfinite()
    one, other = stream.objective(inputs.only(known)), stream.missing(inputs.only(~known))
    return PolicyLoss(one.loss + other.loss, one.clipped | other.clipped, one.clipped_lower | other.clipped_lower)
