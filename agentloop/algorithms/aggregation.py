"""How token losses become one number.

A weight per token is computed once for a whole optimizer step; the loss of any part of the step is the sum of
token loss x weight over that part. So the loss can't depend on how the step is cut into micro-batches.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
