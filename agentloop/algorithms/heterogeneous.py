"""One loss for rows of several kinds, each with its own objective, and how token losses become one number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentloop.algorithms.objectives import Objective, ObjectiveInput, PolicyLoss

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
    """Weight of every token of one optimizer step, [B, T] float64; 0 outside `loss_mask`.

    With N trained tokens, B trajectories that have one, and n_i trained tokens of trajectory i over all its
    rows:

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
    """[B] weight of each trained token of a row, from the rows' numbers of trained tokens."""
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
            if norm_length is None:
                raise ValueError("norm_length must be a number of tokens for seq-mean-token-sum-norm, got None.")
            denominator = (sequences * norm_length).expand_as(tokens)
    return (tokens > 0) / denominator.double()


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
    old_log_probs: Tensor,
    behavior_log_probs: Tensor,
    *,
    replay_mask: Tensor,
    fresh: Anchor,
    replay: Anchor,
    hinted: tuple[Tensor, Anchor] | None = None,
) -> Tensor:
    """The denominator of each row's ratio, [B, T] nats: `old` or `behavior`, chosen by the kind of row.

    `hinted`: which rows, [B] bool, have an anchor of their own whatever their stream is.

    Where the behavior policy is unknown, the old log-probs stand in for it: the ratio is 1 until the weights change.
    Whether such a token may be trained at all is for the caller to say.
    """
    behavior_rows = torch.where(replay_mask, replay == "behavior", fresh == "behavior")
    if hinted is not None:
        behavior_rows = torch.where(hinted[0], hinted[1] == "behavior", behavior_rows)
    chosen = behavior_rows[:, None] & behavior_log_probs.isfinite()
    return torch.where(chosen, behavior_log_probs.to(old_log_probs.dtype), old_log_probs)


def heterogeneous_loss(
    inputs: ObjectiveInput,
    *,
    replay_mask: Tensor,
    fresh: StreamLoss,
    replay: StreamLoss,
    hinted: tuple[Tensor, StreamLoss] | None = None,
    importance_weights: Tensor | None = None,
) -> HeterogeneousLoss:
    """Each row by the objective of its kind, which is given the rows of that kind alone, times its importance weights.

    `hinted`: which fresh rows, [B] bool, have a loss of their own, and which.

    Raises ValueError if the weights require grad: a gradient through them would be another objective.
    """
    loss, log_ratios = torch.zeros_like(inputs.log_probs), inputs.log_ratios
    clipped, lower = torch.zeros_like(inputs.loss_mask), torch.zeros_like(inputs.loss_mask)
    kinds = [(~replay_mask, fresh), (replay_mask, replay)]
    if hinted is not None:
        kinds = [(~replay_mask & ~hinted[0], fresh), (replay_mask, replay), (hinted[0], hinted[1])]
    for rows, stream in kinds:
        positions = rows.nonzero()[:, 0]
        if len(positions):
            chosen = inputs.rows(positions)
            if stream.missing is None:
                part = stream.objective(chosen)
            else:
                part = _two_objectives(chosen, stream.objective, stream.missing)
            loss = loss.index_copy(0, positions, part.loss)
            clipped[positions], lower[positions] = part.clipped, part.clipped_lower
    if importance_weights is not None:
        if importance_weights.requires_grad:
            raise ValueError("importance_weights must be detached, got a tensor that requires grad. Call .detach().")
        loss = loss * torch.where(inputs.loss_mask, importance_weights.to(loss.dtype), 0.0)
    return HeterogeneousLoss(PolicyLoss(loss, clipped, lower), log_ratios.detach())


def _two_objectives(inputs: ObjectiveInput, objective: Objective, missing: Objective) -> PolicyLoss:
    """`missing` for the tokens whose behavior policy is unknown, `objective` for the others."""
    known = inputs.behavior_log_probs.isfinite()
    one, other = objective(inputs.only(known)), missing(inputs.only(~known))
    return PolicyLoss(one.loss + other.loss, one.clipped | other.clipped, one.clipped_lower | other.clipped_lower)
