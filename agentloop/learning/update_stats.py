"""Measures what one update did to its rows: numbers per trajectory, and from them the metrics of each stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentloop.algorithms.log_probs import log_ratios, sum_by_trajectory
from agentloop.algorithms.objective_input import ObjectiveInput, PolicyLoss
from agentloop.distributed.ranks import Ranks
from agentloop.learning.batch import ScoredBatch
from replay.records import FRESH, REPLAY
from replay.storage.staleness import ESS_BY_AGE, age_bucket

_STREAMS = ((FRESH, False), (REPLAY, True))
"""Each stream's name, and whether its rows are replayed."""
_OF_PASSES = ("clipped", "clipped_lower", "scored", "ratio", "approx_kl", "pg_loss")
"""Sums that gradient passes add to."""
_QUANTILES = (1, 50, 99)
"""Percent."""


@dataclass(frozen=True)
class Drift:
    """exp(old_log_probs - behavior_log_probs) over each trajectory's action tokens; all [N] float64 but the first."""

    token_logs: Tensor
    """[B, T] nats, clamped: log drift of each token; NaN where it is not known."""
    tokens: Tensor
    """Action tokens whose behavior log-prob is known; where this is 0 the other arrays say nothing."""
    sum: Tensor
    token_gap_max: Tensor
    """Nats: the largest |old_log_probs - behavior_log_probs| of its tokens, not clamped."""
    weight: Tensor
    """exp(mean of the clamped log drift): near 1 on long trajectories, whatever the drift of single tokens."""
    squares: Tensor
    """Sum of exp(2 d)."""
    kl_sum: Tensor
    """Sum of exp(d) - d - 1 with d = the log drift: estimates KL(behavior || old)."""

    def effective_sample_size(self, trajectories: Tensor) -> float:
        """(sum w)^2 / (n sum w^2) over the n action tokens of some trajectories, w being each token's drift.

        Each trajectory has a token. They are chosen by [N] bool or by their indices.
        """
        tokens, total, squares = (part[trajectories].sum() for part in (self.tokens, self.sum, self.squares))
        return float(total**2 / (tokens * squares))


def trajectory_drift(
    old_log_probs: Tensor, behavior_log_probs: Tensor, *, response_mask: Tensor, trajectory: Tensor, count: int
) -> Drift:
    """Compute the drift of `count` trajectories; `trajectory` [B] is each row's. Unknown log-probs are left out."""
    known = response_mask & ~behavior_log_probs.isnan()
    logs = log_ratios(old_log_probs, behavior_log_probs, known)
    precise = logs.double()
    parts = (known, precise, precise.exp() * known, (2 * precise).exp() * known, precise.expm1() - precise)
    tokens, total_log, total, squares, kl = sum_by_trajectory(torch.stack(parts), trajectory, count)
    gaps = torch.where(known, old_log_probs.double() - behavior_log_probs.double(), 0.0).abs().amax(dim=1)
    return Drift(
        token_logs=torch.where(known, logs, torch.nan),
        tokens=tokens,
        sum=total,
        token_gap_max=torch.zeros_like(total).scatter_reduce(0, trajectory, gaps, "amax"),
        weight=(total_log / tokens.clamp_min(1)).exp(),
        squares=squares,
        kl_sum=kl,
    )


def drift_of(scored: ScoredBatch) -> Drift:
    """Compute the drift of every trajectory of the batch."""
    batch = scored.batch
    return trajectory_drift(
        scored.old_log_probs,
        batch.behavior_log_probs,
        response_mask=batch.response_mask,
        trajectory=batch.trajectory,
        count=len(batch.members),
    )


RowStats = dict[str, Any]
"""Numbers of one trajectory in one update, by their names in `DrawRecord`; None: nothing was measured, which is not 0.
"""


class UpdateTotals:
    """Sums over the gradient passes of some optimizer steps, [N] float64, one entry per trajectory.

    Everything is added up per trajectory and read per stream at the end, so that no stream can leak into
    another's metric. A trajectory belongs to one stream.
    """

    def __init__(self, replayed: Tensor) -> None:
        zeros = torch.zeros(len(replayed), dtype=torch.float64, device=replayed.device)
        self.replayed = replayed
        """[N] bool"""
        self.trained = zeros.clone()
        """Trained tokens, also of rows without a gradient pass: the denominator of clip fractions."""
        self.clipped = zeros.clone()
        self.clipped_lower = zeros.clone()
        self.scored = zeros.clone()
        """Trained tokens of the gradient passes: the denominator of ratios and approx_kl."""
        self.ratio = zeros.clone()
        self.ratios: list[tuple[Tensor, Tensor]] = []
        """By pass: ratios [B, T] float32, NaN where not trained, and whether their rows are replayed, [B]."""
        self.approx_kl = zeros.clone()
        self.pg_loss = zeros.clone()
        """Token losses weighted as if the stream were alone in its optimizer step."""
        self.steps = {False: 0, True: 0}
        """Optimizer steps in which each stream (replayed or not) had a trained token."""

    def count_step(self, loss_mask: Tensor, trajectory: Tensor) -> None:
        """Count the trained tokens of an optimizer step's rows."""
        self.trained.index_add_(0, trajectory, loss_mask.sum(dim=1).double())
        for replayed in self.steps:
            self.steps[replayed] += int(bool(loss_mask[self.replayed[trajectory] == replayed].any()))

    def add(self, policy: PolicyLoss, inputs: ObjectiveInput, *, weights: Tensor) -> None:
        """Add one gradient pass; `weights` are those of each stream alone."""
        mask, logs = inputs.loss_mask, inputs.log_ratios.detach()
        ratios = logs.double().exp()
        surprise = ratios - 1 - logs.double()
        parts = (policy.clipped, policy.clipped_lower, mask, ratios * mask, surprise * mask)
        stacked = torch.stack([*parts, policy.loss.detach() * weights])
        sums = sum_by_trajectory(stacked, inputs.trajectory, len(self.trained))
        for name, added in zip(_OF_PASSES, sums, strict=True):
            getattr(self, name).add_(added)
        self.ratios.append((torch.where(mask, ratios, torch.nan).float(), self.replayed[inputs.trajectory]))

    def sum_over(self, ranks: Ranks) -> None:
        """Add up the passes of all ranks. Trained tokens are not added: every rank has counted them all."""
        sums = ranks.sum(torch.stack([getattr(self, name) for name in _OF_PASSES]))
        for name, total in zip(_OF_PASSES, sums, strict=True):
            setattr(self, name, total)
        gathered = [(ranks.gather(self.ratios_of(replayed=replayed)), replayed) for _, replayed in _STREAMS]
        self.ratios = [(values[:, None], values.new_full(values.shape, flag).bool()) for values, flag in gathered]

    def metrics(self) -> dict[str, float]:
        """Compute each stream's metrics over its own tokens. A metric without tokens is absent."""
        metrics: dict[str, float] = {}
        for stream, replayed in _STREAMS:
            rows = self.replayed == replayed
            trained, scored = float(self.trained[rows].sum()), float(self.scored[rows].sum())
            if trained:
                metrics[f"actor/{stream}/pg_loss"] = float(self.pg_loss[rows].sum()) / self.steps[replayed]
                metrics[f"actor/{stream}/pg_clipfrac"] = float(self.clipped[rows].sum()) / trained
                metrics[f"actor/{stream}/pg_clipfrac_lower"] = float(self.clipped_lower[rows].sum()) / trained
            if scored:
                metrics[f"actor/{stream}/approx_kl"] = float(self.approx_kl[rows].sum()) / scored
            if trained and scored:
                metrics[f"actor/{stream}/ratio_mean"] = float(self.ratio[rows].sum()) / scored
                ratios = self.ratios_of(replayed=replayed)
                ends = {"min": float(ratios.min()), "max": float(ratios.max())}
                found = ends | quantiles(ratios)
                metrics |= {f"actor/{stream}/ratio_{name}": value for name, value in found.items()}
        return metrics

    def ratios_of(self, *, replayed: bool) -> Tensor:
        """Return the ratios [n] of all trained tokens of one stream in all passes."""
        none = torch.empty(0, device=self.replayed.device)
        together = torch.cat([none, *(ratios[rows == replayed].flatten() for ratios, rows in self.ratios)])
        return together[~together.isnan()]


@dataclass(frozen=True)
class UpdateResult:
    """The results of one update that are shown and stored."""

    metrics: dict[str, float]
    rows: dict[str, RowStats]
    """By trajectory id."""
    advantages: dict[str, float]
    """By trajectory id; those of a critic are the means over the trained tokens."""
    optimizer_steps: int = 0
    """ppo_epochs x ceil(batch / mini_batch); steps that were skipped count too. A critic makes as many."""
    note: str | None = None
    """A line to print; None: nothing."""


def update_result(scored: ScoredBatch, totals: UpdateTotals) -> UpdateResult:
    """Combine the scored batch's drift with ratios and losses of its gradient passes, if there were any."""
    batch, drift = scored.batch, drift_of(scored)
    draws = [member.draw for member in batch.members]
    ages = [age_bucket(draw.staleness) if draw is not None and draw.stream == REPLAY else None for draw in draws]
    return UpdateResult(
        drift_metrics(drift, totals.replayed, ages, replay_mask=batch.replay_mask) | totals.metrics(),
        row_stats(drift, totals, [member.trajectory.id for member in batch.members]),
        _mean_advantages(scored),
    )


def _mean_advantages(scored: ScoredBatch) -> dict[str, float]:
    """The advantage of each trajectory. With a critic it is the mean over its trained tokens."""
    batch = scored.batch
    if scored.values is None:
        return {member.trajectory.id: member.advantage for member in batch.members}
    sums = sum_by_trajectory(batch.advantages, batch.trajectory, batch.num_trajectories)
    counts = sum_by_trajectory(batch.loss_mask, batch.trajectory, batch.num_trajectories)
    means = zip(batch.trajectory_ids, _quotients(sums, counts), strict=True)
    return {name: mean for name, mean in means if mean is not None}


def fresh_entropy(scored: ScoredBatch) -> dict[str, float]:
    """`actor/entropy` before the update: the mean over the fresh rows' action tokens.

    Rows that needed no pass count with the entropy that was measured when they were sampled.
    """
    batch, entropies = scored.batch, scored.entropies
    assert entropies is not None
    stored = [member.trajectory.record.mean_entropy for member in batch.members]
    at_sampling = entropies.new_tensor([math.nan if value is None else value for value in stored])
    values = torch.where(entropies.isnan(), at_sampling[batch.trajectory][:, None], entropies)
    fresh = values[batch.response_mask & ~batch.replay_mask[:, None]]
    known = fresh[~fresh.isnan()]
    return {"actor/entropy": float(known.mean())} if len(known) else {}


def drift_metrics(
    drift: Drift, replayed: Tensor, ages: Sequence[str | None], *, replay_mask: Tensor
) -> dict[str, float]:
    """Drift and effective sample size of each stream, over trajectories with known behavior log-probs.

    `ages` names the age bucket of each trajectory; every bucket of replayed trajectories has an ESS of its
    own, because the oldest rows go bad first, which a mean over all ages hides.
    """
    metrics: dict[str, float] = {}
    for stream, flag in _STREAMS:
        rows = (replayed == flag) & (drift.tokens > 0)
        if bool(rows.any()):
            metrics[f"actor/{stream}/drift_mean"] = float(drift.sum[rows].sum() / drift.tokens[rows].sum())
            metrics[f"actor/{stream}/token_gap_max"] = float(drift.token_gap_max[rows].max())
            metrics[f"actor/{stream}/ess"] = drift.effective_sample_size(rows)
            logs = drift.token_logs[replay_mask == flag]
            found = quantiles(logs[~logs.isnan()].exp())
            metrics |= {f"actor/{stream}/drift_{name}": value for name, value in found.items()}
    old = (replayed & (drift.tokens > 0)).tolist()
    for age in sorted({age for age, counts in zip(ages, old, strict=True) if counts and age is not None}):
        rows = torch.tensor([counts and own == age for own, counts in zip(ages, old, strict=True)])
        metrics[f"{ESS_BY_AGE}{age}"] = drift.effective_sample_size(rows.to(drift.weight.device))
    return metrics


def quantiles(values: Tensor) -> dict[str, float]:
    """`p01`, `p50` and `p99` of [n] values. Quantile q is the value of rank ceil(q n): one that occurred."""
    ordered = values.sort().values
    ranks = {percent: -(-percent * len(values) // 100) - 1 for percent in _QUANTILES}
    return {f"p{percent:02d}": float(ordered[rank]) for percent, rank in ranks.items()}


def row_stats(drift: Drift, totals: UpdateTotals, trajectory_ids: Sequence[str]) -> dict[str, RowStats]:
    """Measure each trajectory of the batch, by its id.

    Drift and gap are over the action tokens with a behavior log-prob. `ess_share` is the trajectory's weight over the
    sum of its stream's. `approx_kl` is per trained token, the mean over the update's passes. `clip_fraction` is the
    share of trained tokens whose loss the clip range decided.
    """
    known, replayed = drift.tokens > 0, totals.replayed
    weights = drift.weight * known
    stream_sums = torch.where(replayed, weights[replayed].sum(), weights[~replayed].sum())
    columns = {
        "drift_mean": _quotients(drift.sum, drift.tokens),
        "token_gap_max": _quotients(drift.token_gap_max, known.double()),
        "ess_share": _quotients(weights, stream_sums * known),
        "approx_kl": _quotients(totals.approx_kl, totals.scored),
        "clip_fraction": _quotients(totals.clipped, totals.trained),
    }
    rows = zip(*columns.values(), strict=True)
    return {id: dict(zip(columns, row, strict=True)) for id, row in zip(trajectory_ids, rows, strict=True)}


def _quotients(numerators: Tensor, denominators: Tensor) -> list[float | None]:
    """None where the denominator is 0."""
    pairs = zip(numerators.tolist(), denominators.tolist(), strict=True)
    return [above / below if below else None for above, below in pairs]
