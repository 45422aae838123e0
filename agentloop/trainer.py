"""One batch, one update: fresh and replayed rows together, under one heterogeneous loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agentloop.batch import Batch, BatchRow, build_batch
from agentloop.config import RunConfig
from agentloop.errors import TrainingStopped, UnknownAnchor
from agentloop.gradients import accumulate_gradients
from agentloop.mini_batches import plan_mini_batches
from agentloop.models.actor import Actor
from agentloop.optimizer import PolicyOptimizer, learning_rate
from agentloop.scoring import ScoredBatch, score
from agentloop.update_stats import RowStats, UpdateTotals, age_bucket, drift_metrics, row_stats
from context.authors import AuthorTable
from replay.records import FRESH, REPLAY, Trajectory


@dataclass(frozen=True)
class UpdateResult:
    metrics: dict[str, float]
    rows: dict[str, RowStats]
    """By trajectory id."""
    optimizer_steps: int
    """ppo_epochs x ceil(batch / mini_batch); steps that were skipped count too."""


@dataclass
class _Log:
    """What happened in the optimizer steps of one update."""

    steps: int = 0
    skipped_no_signal: int = 0
    skipped_bad_gradient: int = 0
    gradient_norms: list[float] = field(default_factory=list)
    kl_losses: list[float] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        metrics = {
            "actor/skipped_no_signal": float(self.skipped_no_signal),
            "actor/skipped_bad_gradient": float(self.skipped_bad_gradient),
        }
        if self.gradient_norms:
            metrics["actor/grad_norm"] = sum(self.gradient_norms) / len(self.gradient_norms)
        if self.kl_losses:
            metrics["actor/kl_loss"] = sum(self.kl_losses) / len(self.kl_losses)
        return metrics


class Trainer:
    """Updates the actor's weights in place and owns its optimizer. Its only randomness is the seeded plan."""

    def __init__(self, actor: Actor, config: RunConfig, *, authors: AuthorTable, reference: Actor | None) -> None:
        if config.kl.loss_coef > 0 and reference is None:
            raise ValueError(f"kl.loss_coef must be 0 without a reference policy, got {config.kl.loss_coef}. Pass one.")
        self._actor = actor
        self._config = config
        self._authors = authors
        self._reference = reference
        self._optimizer = PolicyOptimizer(actor.model, config.optimizer)

    def update(self, rows: Sequence[BatchRow], *, iteration: int) -> UpdateResult:
        """Old log-probs of all rows, then ppo_epochs x ceil(batch / mini_batch) optimizer steps.

        A step without a signal (no advantage but 0 and no KL or entropy term, or a gradient of exactly 0)
        leaves weights, moments and step counts as they are; so does one with a NaN or infinite loss or
        gradient.

        Metrics: `pg_loss` of a stream is its token loss under the configured aggregation with the stream's
        own denominator, mean over optimizer steps; without replay, KL and entropy term it is the optimised
        loss. Clip fractions are over all trained tokens of the stream; `ratio_*` and `approx_kl`, the mean of
        (r - 1) - log r against the anchor, over those that had a gradient pass. Before the first step:
        `drift_*` and `ess` (of the replay stream also by age) over action tokens, and `actor/entropy`, the mean
        over the fresh rows' action tokens. `grad_norm` is before clipping.

        Raises TrainingStopped for a NaN or infinite loss or gradient if `optimizer.on_bad_gradient` is stop,
        and UnknownAnchor, before anything has changed, for a trained token without the behavior log-prob its
        anchor needs.
        """
        batch = build_batch(rows, self._authors)
        self._require_behavior(batch)
        scored, metrics = self._score(batch, reference=self._reference if self._config.kl.loss_coef else None)
        rate = learning_rate(self._config.optimizer, iteration=iteration, iterations=self._config.run.iterations)
        self._optimizer.set_learning_rate(rate)
        self._optimizer.clear_gradients()
        totals = UpdateTotals(scored.batch.replayed)
        log = _Log()
        groups = [None if row.stream == REPLAY else row.trajectory.record.group for row in rows]
        for epoch in range(self._config.batch.ppo_epochs):
            seed = (self._config.run.seed, iteration, epoch)
            for members in plan_mini_batches(groups, self._config.batch.mini_batch, seed=seed):
                log.steps += 1
                chosen = torch.isin(
                    scored.batch.trajectory, torch.tensor(members, dtype=torch.int64, device=self._actor.device)
                )
                self._step(scored.rows(chosen.nonzero()[:, 0]), totals, log, iteration=iteration)
        drift = scored.drift()
        metrics |= drift_metrics(drift, totals.replayed, _ages(rows)) | totals.metrics() | log.metrics()
        metrics["actor/learning_rate"] = rate
        return UpdateResult(metrics, row_stats(drift, totals, batch.trajectory_ids), log.steps)

    def observe(self, rows: Sequence[BatchRow]) -> UpdateResult:
        """Score rows in passes of their own, without gradient or a trace in weights, optimizer or random
        state.

        `drift_*` and `ess` as in `update`; `approx_kl` is the mean of r - 1 - log r over action tokens with r
        = drift, the only ratio there is without an update. There are no losses and no clip fractions.
        """
        scored, _ = self._score(build_batch(rows, self._authors), reference=None)
        drift = scored.drift()
        totals = UpdateTotals(scored.batch.replayed)
        totals.observe(drift)
        metrics = drift_metrics(drift, totals.replayed, _ages(rows)) | totals.metrics()
        return UpdateResult(metrics, row_stats(drift, totals, scored.batch.trajectory_ids), 0)

    def mean_entropies(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Nats per action token of the current policy; NaN where there is none."""
        batch = build_batch([BatchRow(t, "replay", 0.0) for t in trajectories], self._authors).to(self._actor.device)
        _, entropies = score(self._actor, batch, max_tokens=self._config.batch.micro_batch_tokens)
        sums = entropies.new_zeros((2, len(trajectories)))
        sums[0].index_add_(0, batch.trajectory, torch.where(batch.response_mask, entropies, 0.0).sum(dim=1))
        sums[1].index_add_(0, batch.trajectory, batch.response_mask.sum(dim=1).to(sums.dtype))
        means: list[float] = (sums[0] / sums[1]).tolist()
        return means

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The optimizer's tensors (live, not copies) and JSON-able values that say what they belong to."""
        return self._optimizer.state(), {"optimizer": "adamw"}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Continue from `state()`, exactly. Raises ValueError for the state of another optimizer or model."""
        if values != {"optimizer": "adamw"}:
            raise ValueError(f"optimizer state must be that of adamw, got {values}.")
        self._optimizer.load_state(tensors)

    def _score(self, batch: Batch, *, reference: Actor | None) -> tuple[ScoredBatch, dict[str, float]]:
        """The batch with its old log-probs, and the entropy of the policy on what it has just sampled."""
        batch = batch.to(self._actor.device)
        max_tokens = self._config.batch.micro_batch_tokens
        old, entropies = score(self._actor, batch, max_tokens=max_tokens)
        ref = None if reference is None else score(reference, batch, max_tokens=max_tokens)[0]
        fresh = batch.response_mask & ~batch.replay_mask[:, None]
        metrics = {"actor/entropy": float(entropies[fresh].mean())} if bool(fresh.any()) else {}
        return ScoredBatch(batch, old, ref), metrics

    def _require_behavior(self, batch: Batch) -> None:
        """Refuse trained tokens whose anchor is unknown: any number in its place would be a made-up ratio."""
        loss = self._config.loss
        unknown = (batch.loss_mask & ~batch.behavior_log_probs.isfinite()).sum(dim=1)
        for row in unknown.nonzero()[:, 0].tolist():
            stream, section = (REPLAY, loss.replay) if batch.replay_mask[row] else (FRESH, loss.fresh)
            if section.anchor == "behavior":
                name = batch.trajectory_ids[int(batch.trajectory[row])]
                raise UnknownAnchor(
                    f"behavior_log_probs of trajectory {name} must be known for every trained token when "
                    f"loss.{stream}.anchor is behavior, got {int(unknown[row])} unknown. "
                    f"Set loss.{stream}.anchor: old, or do not train on it."
                )

    def _step(self, mini: ScoredBatch, totals: UpdateTotals, log: _Log, *, iteration: int) -> None:
        """One optimizer step over the rows of one mini-batch."""
        step_totals = UpdateTotals(totals.replayed)
        step = accumulate_gradients(self._actor, mini, self._config, totals=step_totals)
        norm = self._optimizer.gradient_norm()
        if not (math.isfinite(step.loss) and math.isfinite(norm)):
            self._optimizer.clear_gradients()
            if self._config.optimizer.on_bad_gradient == "stop":
                raise TrainingStopped(
                    f"loss and gradient must be finite, got loss {step.loss} and gradient norm {norm} in "
                    f"optimizer step {log.steps} of iteration {iteration}. Lower optimizer.learning_rate, "
                    "or set optimizer.on_bad_gradient: skip."
                )
            log.skipped_bad_gradient += 1
            return
        totals.merge(step_totals)
        if self._config.kl.loss_coef > 0:
            log.kl_losses.append(step.kl)
        if norm == 0.0:
            # Stepping would still move the weights: by momentum and by weight decay.
            self._optimizer.clear_gradients()
            log.skipped_no_signal += 1
            return
        log.gradient_norms.append(norm)
        self._optimizer.step(norm)


def _ages(rows: Sequence[BatchRow]) -> list[str | None]:
    """The age bucket of each replayed row."""
    return [age_bucket(row.staleness) if row.stream == REPLAY else None for row in rows]
