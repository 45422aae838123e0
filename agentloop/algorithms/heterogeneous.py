"""One loss for rows of several kinds, each with its own objective, and how token losses become one number."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentloop.algorithms.log_probs import require_detached
from agentloop.algorithms.objective_input import ObjectiveInput, PolicyLoss, TokenLoss

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Normalise = Literal["joint", "per_stream"]


def token_weights(
    loss_mask: Tensor,
    trajectory: Tensor,
    *,
    replay_mask: Tensor,
    mode: Aggregation,
    norm_length: float | None,
    normalise: Normalise,
    replay_weight: float,
) -> Tensor:
    """Compute the weight of every token of one optimizer step, [B, T] float64; 0 outside `loss_mask`.

    With N trained tokens, B trajectories that have one, and n_i trained tokens of trajectory i over all its rows:

    - token-mean: 1 / N
    - seq-mean-token-sum: 1 / B
    - seq-mean-token-mean: 1 / (B n_i)
    - seq-mean-token-sum-norm: 1 / (B norm_length)

    `joint` counts N and B over both streams. `per_stream` counts them within each stream and multiplies the
    replay stream by `replay_weight`. `trajectory` is each row's trajectory, [B] int64; `replay_mask` must be
    the same for all rows of a trajectory. Trajectories without a trained token are in no denominator.
    """
    tokens = loss_mask.sum(dim=1).double()
    if normalise == "joint":
        row_weights = _row_weights(tokens, trajectory, mode=mode, norm_length=norm_length)
    else:
        fresh = _row_weights(tokens * ~replay_mask, trajectory, mode=mode, norm_length=norm_length)
        replayed = _row_weights(tokens * replay_mask, trajectory, mode=mode, norm_length=norm_length)
        row_weights = torch.where(replay_mask, replay_weight * replayed, fresh)
    return loss_mask * row_weights[:, None]


def _row_weights(tokens: Tensor, trajectory: Tensor, *, mode: Aggregation, norm_length: float | None) -> Tensor:
    """Compute the weight of a trained token of each row, [B], from the rows' numbers of trained tokens."""
    count = int(trajectory.max()) + 1 if len(trajectory) else 0
    per_trajectory = tokens.new_zeros(count).index_add_(0, trajectory, tokens)
    sequences = (per_trajectory > 0).sum().clamp_min(1)
    match mode:
        case "token-mean":
            denominator = tokens.sum().clamp_min(1).expand_as(tokens)
        case "seq-mean-token-sum":
            denominator = sequences.expand_as(tokens)
        case "seq-mean-token-mean":
            denominator = sequences * per_trajectory[trajectory].clamp_min(1)
        case "seq-mean-token-sum-norm":
            assert norm_length is not None, "the configuration of this aggregation has one"
            denominator = (sequences * norm_length).expand_as(tokens)
    return (tokens > 0) / denominator.double()


Anchor = Literal["old", "behavior"]


@dataclass(frozen=True)
class StreamLoss:
    """The loss of the rows of one kind."""

    objective: TokenLoss
    anchor: Anchor = "old"
    """The denominator of the ratio."""
    missing: TokenLoss | None = None
    """The objective of tokens whose behavior policy is unknown; None: `objective`."""
    whole_trajectories: bool = False
    """All rows of a trajectory must be in one pass."""
    needs_advantage: bool = True
    """A token of advantage 0 has neither loss nor gradient."""


Kinds = Sequence[tuple[Tensor, StreamLoss]]
"""Masks of rows, [B] bool, with their loss; each row is in one mask."""


def anchor_log_probs(old_log_probs: Tensor, behavior_log_probs: Tensor, kinds: Kinds) -> Tensor:
    """Choose the denominator of each row's ratio, [B, T] nats: `old` or `behavior`, as its loss says.

    Where the behavior policy is unknown, the old log-probs stand in for it: the ratio is 1 until the weights change.
    The caller decides whether such a token may be trained.
    """
    behavior_rows = torch.stack([rows & (loss.anchor == "behavior") for rows, loss in kinds]).any(dim=0)
    chosen = behavior_rows[:, None] & behavior_log_probs.isfinite()
    return torch.where(chosen, behavior_log_probs.to(old_log_probs.dtype), old_log_probs)


def heterogeneous_loss(inputs: ObjectiveInput, kinds: Kinds, *, importance_weights: Tensor | None = None) -> PolicyLoss:
    """Compute each row's loss by the objective of its kind, times the importance weights, which must be detached."""
    loss = torch.zeros_like(inputs.log_probs)
    clipped, lower = torch.zeros_like(inputs.loss_mask), torch.zeros_like(inputs.loss_mask)
    for rows, kind in kinds:
        positions = rows.nonzero()[:, 0]
        if len(positions):
            chosen = inputs.rows(positions)
            if kind.missing is None:
                part = kind.objective(chosen)
            else:
                part = _two_objectives(chosen, kind.objective, kind.missing)
            loss = loss.index_copy(0, positions, part.loss)
            clipped[positions], lower[positions] = part.clipped, part.clipped_lower
    if importance_weights is not None:
        require_detached(importance_weights=importance_weights)
        loss = loss * torch.where(inputs.loss_mask, importance_weights.to(loss.dtype), 0.0)
    return PolicyLoss(loss, clipped, lower)


def _two_objectives(inputs: ObjectiveInput, objective: TokenLoss, missing: TokenLoss) -> PolicyLoss:
    """Use `missing` for the tokens whose behavior policy is unknown, and `objective` for the others."""
    known = inputs.behavior_log_probs.isfinite()
    one, other = objective(inputs.only(known)), missing(inputs.only(~known))
    return PolicyLoss(one.loss + other.loss, one.clipped | other.clipped, one.clipped_lower | other.clipped_lower)
