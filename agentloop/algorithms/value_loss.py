"""What a critic is taught, per token, and how well it knows already."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValueLoss:
    """Per token, [B, T]; 0 outside the mask."""

    loss: Tensor
    """Carries gradient; reward units squared."""
    clipped: Tensor
    """bool: the clip range decided the loss."""


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, mask: Tensor, value_clip: float | None
) -> ValueLoss:
    """0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), c = `value_clip`; None: 0.5 (V - R)^2.

    PPO's clipped value loss with the factor 1/2 (Schulman et al. 2017's code; so do verl and TRL): the gradient of an
    unclipped token is V - R. Raises ValueError if old values or returns require grad.
    """
    for name, tensor in (("old_values", old_values), ("returns", returns)):
        if tensor.requires_grad:
            raise ValueError(f"{name} must be detached, got a tensor that requires grad. Call .detach() on it.")
    # Replaced before the arithmetic: whatever stands outside the mask must not reach the gradient as 0 x inf.
    values, old_values, returns = (torch.where(mask, t, torch.zeros_like(t)) for t in (values, old_values, returns))
    plain = (values - returns).square()
    if value_clip is None:
        return ValueLoss(0.5 * plain, torch.zeros_like(mask))
    # Not old + clamp(values - old): that is rounded also where nothing is clipped.
    near = values.clamp(old_values - value_clip, old_values + value_clip)
    bounded = (near - returns).square()
    return ValueLoss(0.5 * torch.maximum(plain, bounded), (bounded > plain).detach())


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """1 - Var(R - V) / Var(R) of [n] values and returns: 1 is perfect, 0 no better than a constant, negative worse.

    None where returns don't vary.
    """
    if len(returns) < 2:
        return None
    spread = float(returns.double().var(correction=0))
    return None if spread == 0.0 else 1.0 - float((returns.double() - values.double()).var(correction=0)) / spread
