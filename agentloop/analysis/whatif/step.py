"""One optimizer step of each objective on some of the rows: computed by the trainer's own function, and not made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from agentloop.algorithms.diagnostics import Drift, EssWeights, sum_by_trajectory
from agentloop.algorithms.heterogeneous import HeterogeneousLoss
from agentloop.analysis.whatif.losses import WhatIfLoss
from agentloop.analysis.whatif.result import Effect, PartData
from agentloop.learning.gradients import StepLoss, accumulate_gradients
from agentloop.learning.optimizer import sum_gradients_in_float32
from agentloop.learning.scoring import ScoredBatch
from agentloop.learning.stream_losses import StreamLosses
from agentloop.learning.update_stats import UpdateTotals
from agentloop.models.actor import Actor

_QUANTILES = (1, 50, 99)
"""Percent."""


@dataclass(frozen=True, eq=False)
class Ready:
    """An objective with the batch as it is given it."""

    loss: WhatIfLoss
    losses: StreamLosses
    scored: ScoredBatch
    """After its correction."""


class ClipTotals(UpdateTotals):
    """Also tells which side of 1 the ratios of clipped tokens are on."""

    def __init__(self, replayed: Tensor) -> None:
        super().__init__(replayed)
        self.clipped_above = torch.zeros_like(self.clipped)

    def add(self, result: HeterogeneousLoss, loss_mask: Tensor, *, weights: Tensor, trajectory: Tensor) -> None:
        super().add(result, loss_mask, weights=weights, trajectory=trajectory)
        above = result.policy.clipped & (result.log_ratios > 0)
        self.clipped_above += sum_by_trajectory(above, trajectory, len(self.trained))


def part_data(
    bucket: str, drift: Drift, members: Tensor, action_tokens: Tensor, *, ess_weights: EssWeights
) -> PartData:
    """Of the trajectories `members` [n] of a batch, with the action tokens [N] of all of them."""
    tokens, known = action_tokens[members], drift.tokens[members]
    measured = members[known > 0]
    there = len(measured) > 0
    return PartData(
        bucket=bucket,
        trajectories=len(members),
        tokens=int(tokens.sum()),
        unknown=int((tokens - known).sum()),
        drift_mean=float(drift.sum[measured].sum() / known.sum()) if there else None,
        drift_max=float(drift.max[measured].max()) if there else None,
        ess=drift.effective_sample_size(measured, ess_weights) if there else None,
    )


def effects_of(
    actor: Actor,
    ready: Sequence[Ready],
    bucket: str,
    members: Tensor,
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Effect]:
    """Every objective on the rows of these trajectories alone. Leaves no gradient behind.

    `progress` hears how many objectives are done.
    """
    effects = []
    for one in ready:
        effects.append(_effect(actor, one, bucket, members))
        progress(len(effects))
    return effects


def _effect(actor: Actor, ready: Ready, bucket: str, members: Tensor) -> Effect:
    step, totals, gradient_norm = _step(actor, ready, members)
    trained, scored = float(totals.trained.sum()), float(totals.scored.sum())

    def share(counted: Tensor) -> float | None:
        return float(counted.sum()) / trained if trained else None

    low, middle, high = _quantiles(totals)
    return Effect(
        objective=ready.loss.name,
        bucket=bucket,
        trained_tokens=int(trained),
        clipped=share(totals.clipped),
        clipped_above=share(totals.clipped_above),
        clipped_below=share(totals.clipped - totals.clipped_above),
        clipped_dual=share(totals.clipped_lower),
        ratio_p01=low,
        ratio_p50=middle,
        ratio_p99=high,
        approx_kl=float(totals.approx_kl.sum()) / scored if scored else None,
        loss=step.loss,
        gradient_norm=gradient_norm,
    )


def _step(actor: Actor, ready: Ready, members: Tensor) -> tuple[StepLoss, ClipTotals, float]:
    """The step with what it counted, and the norm of its gradient."""
    batch = ready.scored.batch
    parameters = [p for p in actor.model.parameters() if p.requires_grad]
    sum_gradients_in_float32(parameters)
    totals = ClipTotals(batch.replayed)
    positions = torch.isin(batch.trajectory, members).nonzero()[:, 0]
    try:
        step = accumulate_gradients(
            actor, ready.scored.select(positions), ready.loss.config, losses=ready.losses, totals=totals
        )
        gradient = [p.grad for p in parameters if p.grad is not None]
        return step, totals, float(nn.utils.get_total_norm(gradient)) if gradient else 0.0
    finally:
        for parameter in parameters:
            parameter.grad = None


def _quantiles(totals: UpdateTotals) -> list[float | None]:
    """Quantile q of n values is the one of rank ceil(q n), as in the metrics of a run."""
    ratios = torch.cat([ratios.flatten() for ratios, _ in totals.ratios]) if totals.ratios else torch.zeros(0)
    ordered = ratios[~ratios.isnan()].sort().values
    if not len(ordered):
        return [None] * len(_QUANTILES)
    return [float(ordered[-(-percent * len(ordered) // 100) - 1]) for percent in _QUANTILES]
