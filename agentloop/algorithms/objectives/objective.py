"""What every objective is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentloop.algorithms.ratios import log_ratios


@dataclass(frozen=True)
class PolicyLoss:
    """One loss and two flags per token, [B, T]; 0 and False outside the loss mask."""

    loss: Tensor
    """Carries gradient."""
    clipped: Tensor
    """bool: a bound of the objective decided the loss."""
    clipped_lower: Tensor
    """bool: the dual clip decided the loss; only where the advantage is negative."""


@dataclass(frozen=True, eq=False)
class ObjectiveInput:
    """Rows of one stream, before aggregation.

    Outside `loss_mask` every [B, T] array but the mask is 0 and cut off from the gradient, whatever was passed: a wild
    or unknown number of a token that is not trained can't reach the loss. Raises ValueError if anything but
    `log_probs` requires grad: a gradient through it would be another objective.
    """

    log_probs: Tensor
    """[B, T] nats, current weights; carries gradient."""
    anchors: Tensor
    """[B, T] nats: the denominator of the ratio, `old` or `behavior` as the stream's anchor says."""
    behavior_log_probs: Tensor
    """[B, T] nats; NaN where no behavior policy is known."""
    advantages: Tensor
    """[B, T] reward units."""
    loss_mask: Tensor
    """[B, T] bool: trained on."""
    trajectory: Tensor
    """[B] int64: the trajectory each row is a segment of, in 0 .. num_trajectories - 1."""
    num_trajectories: int
    """Trajectories of the whole batch; not all of them need to have a row here."""
    signal_share: Tensor
    """[B]: of the row's stream, the share of the optimizer step's trajectories that have an advantage other than 0."""

    def __post_init__(self) -> None:
        for name in ("anchors", "behavior_log_probs", "advantages", "signal_share"):
            if getattr(self, name).requires_grad:
                raise ValueError(f"{name} must be detached, got a tensor that requires grad. Call .detach() on it.")
        zero = torch.zeros((), dtype=self.log_probs.dtype, device=self.log_probs.device)
        for name in ("log_probs", "anchors", "behavior_log_probs", "advantages"):
            whole = getattr(self, name).to(self.log_probs.dtype)
            object.__setattr__(self, name, torch.where(self.loss_mask, whole, zero))

    def log_ratios(self) -> Tensor:
        """[B, T] nats: clamp(log_probs - anchors, -20, 20); beyond the bound a ratio carries no gradient."""
        return log_ratios(self.log_probs, self.anchors, self.loss_mask)

    def only(self, mask: Tensor) -> ObjectiveInput:
        """With those trained tokens alone that are in `mask` [B, T]."""
        return replace(self, loss_mask=self.loss_mask & mask)

    def rows(self, positions: Tensor) -> ObjectiveInput:
        """Some of the rows."""
        names = ("log_probs", "anchors", "behavior_log_probs", "advantages", "loss_mask", "trajectory", "signal_share")
        return replace(self, **{name: getattr(self, name)[positions] for name in names})

    def trajectory_sum(self, values: Tensor) -> Tensor:
        """[B, 1]: the sum of [B, T] values over the trained tokens of the row's whole trajectory, with gradient."""
        rows = torch.where(self.loss_mask, values, torch.zeros_like(values)).sum(dim=1)
        return rows.new_zeros(self.num_trajectories).index_add(0, self.trajectory, rows)[self.trajectory][:, None]

    def trajectory_mean(self, values: Tensor) -> Tensor:
        """[B, 1]: likewise their mean; 0 for a trajectory without a trained token."""
        return self.trajectory_sum(values) / self.trajectory_sum(torch.ones_like(values)).clamp_min(1)


Objective = Callable[[ObjectiveInput], PolicyLoss]
"""An objective with its options bound."""


def unclipped(loss: Tensor) -> PolicyLoss:
    """The loss of an objective that has no bounds."""
    never = torch.zeros_like(loss, dtype=torch.bool)
    return PolicyLoss(loss, never, never)
