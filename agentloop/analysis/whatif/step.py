"""One optimizer step of each objective on some of the rows: computed by the trainer's own function, and not made."""

from __future__ import annotations

import math
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
Gradient = list[Tensor | None]
"""One per trainable parameter; None where it has none."""


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
    actor: Actor, ready: Sequence[Ready], bucket: str, members: Tensor, *, told: Callable[[int], None] = lambda _: None
) -> list[Effect]:
    """Every objective on the rows of these trajectories alone. Leaves no gradient behind.

    `told` hears how many objectives are done. Holds the gradient of each at once: as many times the trained weights.
    """
    steps = []
    for one in ready:
        steps.append(_step(actor, one, members))
        told(len(steps))
    names = [one.loss.name for one in ready]
    gradients = [gradient for _, _, gradient in steps]
    cosines = [{name: _cosine(mine, other) for name, other in zip(names, gradients, strict=True)} for mine in gradients]
    return [
        _effect(name, bucket, step, totals, gradient, told)
        for name, (step, totals, gradient), told in zip(names, steps, cosines, strict=True)
    ]


def _step(actor: Actor, ready: Ready, members: Tensor) -> tuple[StepLoss, ClipTotals, Gradient]:
    batch = ready.scored.batch
    parameters = [p for p in actor.model.parameters() if p.requires_grad]
    sum_gradients_in_float32(parameters)
    totals = ClipTotals(batch.replayed)
    positions = torch.isin(batch.trajectory, members).nonzero()[:, 0]
    try:
        step = accumulate_gradients(
            actor, ready.scored.select(positions), ready.loss.config, losses=ready.losses, totals=totals
        )
        return step, totals, [p.grad for p in parameters]
    finally:
        for parameter in parameters:
            parameter.grad = None


def _effect(
    name: str, bucket: str, step: StepLoss, totals: ClipTotals, gradient: Gradient, cosines: dict[str, float | None]
) -> Effect:
    trained, scored = float(totals.trained.sum()), float(totals.scored.sum())

    def share(counted: Tensor) -> float | None:
        return float(counted.sum()) / trained if trained else None

    low, middle, high = _quantiles(totals)
    return Effect(
        objective=name,
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
        gradient_norm=_norm(gradient),
        cosines=cosines,
    )


def _quantiles(totals: UpdateTotals) -> list[float | None]:
    """Quantile q of n values is the one of rank ceil(q n), as in the metrics of a run."""
    ratios = torch.cat([ratios.flatten() for ratios, _ in totals.ratios]) if totals.ratios else torch.zeros(0)
    ordered = ratios[~ratios.isnan()].sort().values
    if not len(ordered):
        return [None] * len(_QUANTILES)
    return [float(ordered[-(-percent * len(ordered) // 100) - 1]) for percent in _QUANTILES]


def _norm(gradient: Gradient) -> float:
    there = [part for part in gradient if part is not None]
    return float(nn.utils.get_total_norm(there)) if there else 0.0


def _cosine(one: Gradient, other: Gradient) -> float | None:
    """Summed in float64, parameter by parameter; None where a gradient is 0 or not finite."""
    dot, squares = 0.0, [0.0, 0.0]
    for a, b in zip(one, other, strict=True):
        a, b = (None if part is None else part.double().flatten() for part in (a, b))
        for place, part in enumerate((a, b)):
            squares[place] += 0.0 if part is None else float(part @ part)
        if a is not None and b is not None:
            dot += float(a @ b)
    size = math.sqrt(squares[0]) * math.sqrt(squares[1])
    if not math.isfinite(size) or size == 0.0:
        return None
    return max(-1.0, min(1.0, dot / size))
