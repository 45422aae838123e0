"""One loss for two streams: fresh and replayed rows, each against its own anchor with its own clip range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentloop.algorithms.log_probs import log_ratios
from agentloop.algorithms.policy_losses import PolicyLoss, ppo_clip

Anchor = Literal["old", "behavior"]


@dataclass(frozen=True)
class ClipRange:
    """Of one stream."""

    clip_low: float
    clip_high: float
    dual_clip: float | None
    """None: off."""


@dataclass(frozen=True)
class HeterogeneousLoss:
    """Per token, [B, T]; 0 (ratio 1) outside the loss mask."""

    policy: PolicyLoss
    log_ratios: Tensor
    """Nats, clamped, against the anchor; without gradient."""


def anchor_log_probs(
    old_log_probs: Tensor, behavior_log_probs: Tensor, *, replay_mask: Tensor, fresh: Anchor, replay: Anchor
) -> Tensor:
    """The denominator of each row's ratio, [B, T] nats: `old` or `behavior`, chosen per stream."""
    behavior_rows = torch.where(replay_mask, replay == "behavior", fresh == "behavior")
    return torch.where(behavior_rows[:, None], behavior_log_probs.to(old_log_probs.dtype), old_log_probs)


def heterogeneous_loss(
    log_probs: Tensor,
    anchors: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    replay_mask: Tensor,
    fresh: ClipRange,
    replay: ClipRange,
) -> HeterogeneousLoss:
    """PPO clip of ratio = exp(clamp(log_probs - anchors, -20, 20)), with the clip range of the row's stream.

    Raises ValueError if advantages or anchors require grad: a gradient through them would be another
    objective.
    """
    for name, tensor in (("advantages", advantages), ("anchors", anchors)):
        if tensor.requires_grad:
            raise ValueError(f"{name} must be detached, got a tensor that requires grad. Call .detach() on it.")
    clamped = log_ratios(log_probs, anchors, loss_mask)
    bounds = torch.tensor([_bounds(fresh), _bounds(replay)], dtype=log_probs.dtype, device=log_probs.device)
    low, high, dual = bounds[replay_mask.long()].T[:, :, None]
    policy = ppo_clip(
        clamped.exp(),
        torch.where(loss_mask, advantages, 0.0).to(log_probs.dtype),
        clip_low=low,
        clip_high=high,
        dual_clip=dual,
    )
    return HeterogeneousLoss(policy, clamped.detach())


def _bounds(clip: ClipRange) -> tuple[float, float, float]:
    return clip.clip_low, clip.clip_high, math.inf if clip.dual_clip is None else clip.dual_clip
