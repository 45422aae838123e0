"""The input and the result of an objective. Importing this module must not import torch (see `catalog.py`).

Outside the loss mask, the loss of an objective and its gradient are exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """One loss and two flags per token, [B, T]; 0 and False outside the loss mask."""

    loss: Tensor
    """Carries gradient."""
    clipped: Tensor
    """bool: a bound of the objective decided the loss."""
    clipped_lower: Tensor
    """bool: the dual clip decided the loss; only where the advantage is negative."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenRows:
    """The part of an objective's input that does not depend on the current weights."""

    behavior_log_probs: Tensor
    """[B, T] float32, nats; NaN where no behavior policy is known."""
    advantages: Tensor
    """[B, T] float32, reward units: the trajectory's advantage, or the token's own; 0 where not trained."""
    loss_mask: Tensor
    """[B, T] bool: trained on."""
    trajectory: Tensor
    """[B] int64: the trajectory of which each row is a segment."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ObjectiveInput(TokenRows):
    """Rows of one stream, before aggregation.

    Outside `loss_mask` every [B, T] array but the mask is set to 0 without gradient. So a wild or unknown number of a
    token that is not trained can't reach the loss. Everything but `log_probs` must be detached.
    """

    log_probs: Tensor
    """[B, T] nats, current weights; carries gradient."""
    anchors: Tensor
    """[B, T] nats: the denominator of the ratio, `old` or `behavior` as the stream's anchor says."""
    num_trajectories: int
    """Number of trajectories in the whole batch; some may have no row here."""
    signal_share: Tensor
    """[B]: share of trajectories with an advantage other than 0, in the row's stream and the whole optimizer step."""

    def __post_init__(self) -> None:
        for name in ("anchors", "behavior_log_probs", "advantages", "signal_share"):
            if getattr(self, name).requires_grad:
                raise ValueError(f"{name} must be detached, got a tensor that requires grad. Call .detach() on it.")
        zero = self.log_probs.new_zeros(())
        for name in ("log_probs", "anchors", "behavior_log_probs", "advantages"):
            whole = getattr(self, name).to(self.log_probs.dtype)
            object.__setattr__(self, name, whole.where(self.loss_mask, zero))

    @cached_property
    def log_ratios(self) -> Tensor:
        """[B, T] nats: clamp(log_probs - anchors, -20, 20); beyond the bound a ratio carries no gradient."""
        from agentloop.algorithms.log_probs import log_ratios

        return log_ratios(self.log_probs, self.anchors, self.loss_mask)

    def only(self, mask: Tensor) -> ObjectiveInput:
        """Leave only those trained tokens that are in `mask` [B, T]."""
        return replace(self, loss_mask=self.loss_mask & mask)

    def rows(self, positions: Tensor) -> ObjectiveInput:
        """Select the rows at these positions."""
        names = ("log_probs", "anchors", "behavior_log_probs", "advantages", "loss_mask", "trajectory", "signal_share")
        chosen = replace(self, **{name: getattr(self, name)[positions] for name in names})
        vars(chosen)["log_ratios"] = self.log_ratios[positions]  # made once, whatever the number of parts
        return chosen

    def trajectory_sum(self, values: Tensor) -> Tensor:
        """Sum [B, T] values over the trained tokens of each row's whole trajectory, to [B, 1] with gradient."""
        rows = values.where(self.loss_mask, values.new_zeros(())).sum(dim=1)
        return rows.new_zeros(self.num_trajectories).index_add(0, self.trajectory, rows)[self.trajectory][:, None]

    def trajectory_mean(self, values: Tensor) -> Tensor:
        """Average [B, T] values over the same tokens; 0 for a trajectory without a trained token."""
        return self.trajectory_sum(values) / self.trajectory_sum(values.new_ones(values.shape)).clamp_min(1)


TokenLoss = Callable[[ObjectiveInput], PolicyLoss]
"""The function of an objective with its options bound."""


def unclipped(loss: Tensor) -> PolicyLoss:
    """Make the loss of an objective without bounds."""
    return clipped_where(loss, loss.new_zeros(loss.shape).bool())


def clipped_where(loss: Tensor, bounded: Tensor) -> PolicyLoss:
    """Make the loss of an objective without a dual clip; `bounded` is where a bound decided it."""
    return PolicyLoss(loss, bounded, bounded.new_zeros(bounded.shape))


def exact_sigmoid(x: Tensor) -> Tensor:
    """Compute the sigmoid with an exact gradient even close to 1, where 1 - s would lose its digits."""
    return (1 - (-x).sigmoid()).where(x > 0, x.sigmoid())
