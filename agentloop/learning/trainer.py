"""One batch, one update: fresh and replayed rows together, under one heterogeneous loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentloop.algorithms.catalog import ALGORITHMS
from agentloop.algorithms.kl import KlCoefficient, kl_estimate
from agentloop.config import RunConfig
from agentloop.distributed.ranks import ALONE, Ranks
from agentloop.distributed.tensor_files import read_tensors, write_tensors
from agentloop.learning.batch import (
    Batch,
    ScoredBatch,
    build_batch,
    fresh_entropy,
    plan_mini_batches,
    reusable_rows,
    score,
    score_batch,
)
from agentloop.learning.critic_update import CriticLearner, CriticLog, value_metrics, with_values
from agentloop.learning.gradients import (
    accumulate_gradients,
    check_behavior,
    corrected,
    stream_losses,
)
from agentloop.learning.optimizer import StepLog, WeightOptimizer, learning_rate, shrunk_factor
from agentloop.learning.update_stats import UpdateResult, UpdateTotals, drift_of, update_result
from agentloop.models.actor import Actor
from agentloop.models.critic import Critic
from agentloop.models.memory import choose_checkpointing, memory_suffices
from context.authors import AuthorTable
from replay.records import REPLAY, BatchRow, Trajectory

SAMPLING_GAP_BOUND = 1e-3
"""Nats: beyond it, log-probs that were stored when a row was sampled do not stand for old ones."""
RECOMPUTED = "actor/old_log_probs_recomputed"
"""1 in an iteration in which they were found to be beyond it, and were recomputed."""


class _StoredLogProbsDiffer(Exception):
    """By so many nats, in the first optimizer step of an update, before any weight has moved."""


@dataclass
class _Log(StepLog):
    """What happened in the policy's optimizer steps of one update."""

    held: bool = False
    """True: the policy makes no more steps in this iteration."""
    held_steps: int = 0
    reuses: bool = False
    """True: there are old log-probs that were not recomputed."""
    sampling_gap: float | None = None
    """Nats, root mean square: how far they are from those of the first step's passes, before any weight has moved."""
    kl_losses: list[float] = field(default_factory=list)

    def metrics(self, role: str = "actor") -> dict[str, float]:
        metrics = super().metrics(role)
        if self.sampling_gap is not None:
            metrics |= {"actor/sampling_gap": self.sampling_gap, RECOMPUTED: 0.0}
        if self.held_steps:
            metrics["actor/held_steps"] = float(self.held_steps)
        if self.kl_losses:
            metrics["actor/kl_loss"] = sum(self.kl_losses) / len(self.kl_losses)
        return metrics


_CRITIC = "critic."
"""Begins the names of the critic's tensors in a checkpoint; no parameter of a policy begins so."""


class Trainer:
    """Updates the actor's weights in place and owns its optimizer. Its only randomness is the seeded plan."""

    def __init__(
        self, actor: Actor, config: RunConfig, *, authors: AuthorTable, reference: Actor | None, ranks: Ranks = ALONE
    ) -> None:
        """On several `ranks` the actor is sharded over them, and each makes the same calls with the same arguments."""
        for name, coef in (("loss_coef", config.kl.loss_coef), ("reward_coef", config.kl.reward_coef)):
            if coef > 0 and reference is None and (name == "loss_coef" or _rewards_here(config)):
                raise ValueError(f"kl.{name} must be 0 without a reference policy, got {coef}. Pass one.")
        self._actor, self._config, self._authors = actor, config, authors
        self._reference, self._ranks = reference, ranks
        self._losses = stream_losses(config.loss)
        self._said = False
        """Whether it was said if activations are kept for backward or made again."""
        self._optimizer = WeightOptimizer(actor.model, config.optimizer)
        self._critic: CriticLearner | None = None
        if ALGORITHMS[config.algorithm].needs_critic:
            self._critic = CriticLearner(Critic(actor, shared=config.critic.backbone == "shared"), config)
        self.kl_coef = KlCoefficient(config.kl.reward_coef, target=config.kl.target, horizon=config.kl.horizon)

    def update(self, rows: Sequence[BatchRow], *, iteration: int) -> UpdateResult:
        """Old log-probs of all rows, then ppo_epochs x ceil(batch / mini_batch) optimizer steps.

        With a critic, first its values, KL-penalised rewards, advantages and returns; and a step of its own with each
        of the policy's, which it also makes while the policy is held (`critic.warmup_iterations`, `kl.early_stop`).

        A step without a signal (a gradient of exactly 0) or with a NaN or infinite loss or gradient leaves weights,
        moments and step counts as they are. docs/reading-a-run.md explains the metrics.

        Rows that are `scored` need no pass for their old log-probs. Where those are found to be further than
        SAMPLING_GAP_BOUND from what the first step's passes say, the update begins again with recomputed ones.

        Raises TrainingStopped for a NaN or infinite loss or gradient if `optimizer.on_bad_gradient` is stop,
        UserError where a GPU's memory ends, and, before anything has changed, UnknownAnchor for a trained token without
        the behavior log-prob its ratio needs, and TruncatedSampling for one of top-p or top-k sampling.
        """
        batch = build_batch(rows, self._authors)
        check_behavior(batch, self._config)
        on_gpu = self._actor.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._actor.device)
        with memory_suffices(self._config.batch.micro_batch_tokens):
            note = self._choose_checkpointing()
            try:
                result = self._update(batch, reuse=True, iteration=iteration)
            except _StoredLogProbsDiffer as found:
                result = self._update(batch, reuse=False, iteration=iteration)
                result.metrics.update({"actor/sampling_gap": found.args[0], RECOMPUTED: 1.0})
        if on_gpu:
            result.metrics["actor/peak_memory_gb"] = torch.cuda.max_memory_allocated(self._actor.device) / 1e9
        return replace(result, note=note)

    def _choose_checkpointing(self) -> str | None:
        """Until activations are made again: what else takes memory grows. Ranks, which must do alike, keep them all.

        Said at first, and when it changes.
        """
        passes = self._actor.passes
        if self._actor.device.type != "cuda" or passes.recomputes or self._ranks.several:
            return None
        tokens = max(self._config.batch.micro_batch_tokens, self._config.context.max_tokens)
        note = choose_checkpointing(self._actor, tokens=tokens, to_come=self.bytes_to_come())
        if self._critic is not None:
            self._critic.critic.passes.recomputes = passes.recomputes
        said, self._said = self._said, True
        return None if said and not passes.recomputes else note

    def bytes_to_come(self) -> int:
        """Of gradients and of the optimizers' states that are not there yet."""
        return sum(part.bytes_to_come() for part in (self._optimizer, self._critic) if part is not None)

    def bytes_of_state(self) -> int:
        """What `save` writes after the first update."""
        return sum(part.bytes_of_state() for part in (self._optimizer, self._critic) if part is not None)

    def _update(self, batch: Batch, *, reuse: bool, iteration: int) -> UpdateResult:
        """`reuse`: behavior log-probs of rows that the present weights sampled are taken for their old ones."""
        needed = self._config.kl.loss_coef > 0 or _rewards_here(self._config)
        reference = self._reference if needed else None
        scored = score_batch(batch, self._actor, reference, self._config, reuse=reuse, ranks=self._ranks)
        metrics = fresh_entropy(scored)
        if self._critic is not None:
            scored = with_values(scored, self._critic.critic, self._config, kl_coef=self.kl_coef.value)
            metrics |= value_metrics(scored, self._config)
        scored, correction = corrected(scored, self._config.loss)
        metrics |= correction
        log, critic_log = _Log(reuses=reuse and bool(reusable_rows(scored.batch).any())), CriticLog()
        totals = UpdateTotals(scored.batch.replayed)
        rates = self._begin(batch, iteration)
        log.held = self._critic is not None and iteration <= self._config.critic.warmup_iterations
        for members in self._plan(batch, iteration):
            chosen = torch.tensor(members, dtype=torch.int64, device=self._actor.device)
            mini = scored.select(torch.isin(scored.batch.trajectory, chosen).nonzero()[:, 0])
            self._step_both(mini, totals, (log, critic_log), iteration=iteration)
        result = update_result(scored, totals, ess_weights=self._config.replay.ess.weights)
        metrics |= self._feed_kl(scored) | log.metrics() | rates
        if self._critic is not None:
            metrics |= critic_log.metrics()
        return replace(result, metrics=metrics | result.metrics, optimizer_steps=log.steps)

    def _begin(self, batch: Batch, iteration: int) -> dict[str, float]:
        """Set the learning rates of the iteration, and forget gradients that others left."""
        rate = learning_rate(self._config.optimizer, iteration=iteration, iterations=self._config.run.schedule_length)
        shrinks = self._config.replay.shortfall == "shrink"
        factor = shrunk_factor(batch.num_trajectories, self._config.batch) if shrinks else 1.0
        rate *= factor
        self._optimizer.set_learning_rate(rate)
        self._optimizer.clear_gradients()
        rates = {"actor/learning_rate": rate}
        if self._critic is not None:
            rates["critic/learning_rate"] = self._critic.begin(iteration=iteration, factor=factor)
        return rates

    def _plan(self, batch: Batch, iteration: int) -> list[list[int]]:
        """The trajectories of each optimizer step."""
        groups = [None if member.stream == REPLAY else member.trajectory.record.group for member in batch.members]
        plan: list[list[int]] = []
        for epoch in range(self._config.batch.ppo_epochs):
            seed = (self._config.run.seed, iteration, epoch)
            plan += plan_mini_batches(groups, self._config.batch.mini_batch, seed=seed)
        return plan

    def _step_both(
        self, mini: ScoredBatch, totals: UpdateTotals, logs: tuple[_Log, CriticLog], *, iteration: int
    ) -> None:
        """The critic's gradient first: a shared backbone takes its part of it in the policy's step."""
        log, critic_log = logs
        if self._critic is None:
            self._step(mini, totals, log, iteration=iteration)
            return
        share = 1.0
        if self._critic.critic.shared:
            share = 0.0 if log.held else self._config.critic.value_coef
        loss = self._critic.accumulate(mini, critic_log, backbone_share=share)
        self._step(mini, totals, log, iteration=iteration)
        self._critic.step(loss, critic_log, iteration=iteration)

    def _feed_kl(self, scored: ScoredBatch) -> dict[str, float]:
        """The KL per fresh action token that rewards were charged for, as metrics and feedback to its coefficient."""
        if not _rewards_here(self._config):
            return {}
        batch, metrics = scored.batch, {"actor/kl_coef": self.kl_coef.value}
        fresh = batch.response_mask & ~batch.replay_mask[:, None]
        if scored.ref_log_probs is not None and bool(fresh.any()):
            estimator = self._config.kl.reward_estimator
            kl = kl_estimate(scored.old_log_probs, scored.ref_log_probs, fresh, estimator).double().sum() / fresh.sum()
            metrics["actor/reward_kl"] = float(kl)
            self.kl_coef.feed(float(kl), int((~batch.replayed).sum()))
        return metrics

    def score_only(self, rows: Sequence[BatchRow]) -> UpdateResult:
        """Score rows in passes of their own, without gradient or a trace in weights, optimizer or random state.

        `drift_*` and `ess` as in `update`; `approx_kl` is the mean of r - 1 - log r over action tokens with r
        = drift, the only ratio there is without an update. There are no losses and no clip fractions.
        """
        batch = build_batch(rows, self._authors)
        scored = score_batch(batch, self._actor, None, self._config, reuse=True, ranks=self._ranks)
        totals = UpdateTotals(scored.batch.replayed)
        drift = drift_of(scored)
        totals.scored, totals.approx_kl = drift.tokens, drift.kl_sum
        return update_result(scored, totals, ess_weights=self._config.replay.ess.weights)

    def mean_entropies(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Nats per action token of the current policy; NaN where there is none."""
        batch = build_batch([BatchRow(t) for t in trajectories], self._authors).to(self._actor.device)
        _, entropies = score(self._actor, batch, max_tokens=self._config.batch.micro_batch_tokens, ranks=self._ranks)
        sums = entropies.new_zeros((2, len(trajectories)))
        sums[0].index_add_(0, batch.trajectory, torch.where(batch.response_mask, entropies, 0.0).sum(dim=1))
        sums[1].index_add_(0, batch.trajectory, batch.response_mask.sum(dim=1).to(sums.dtype))
        means: list[float] = (sums[0] / sums[1]).tolist()
        return means

    def state(self) -> dict[str, Tensor]:
        """The tensors of optimizer and critic: live, not copies."""
        tensors = self._optimizer.state()
        if self._critic is not None:
            tensors |= {f"{_CRITIC}{name}": tensor for name, tensor in self._critic.state().items()}
        return tensors

    def values(self) -> dict[str, Any]:
        """What else a checkpoint holds, as JSON has it."""
        return {"kl_coef": self.kl_coef.value}

    def save(self, folder: Path) -> None:
        """The tensors of `state()`, of several ranks each its own part of them."""
        write_tensors(folder, self.state(), self._ranks)

    def load(self, folder: Path, values: dict[str, Any]) -> None:
        """Continue from `save()` and `values()`, whoever wrote them, exactly."""
        self.load_state(read_tensors(folder, places=self._place, ranks=self._ranks), values)

    def _place(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Like the parameter it belongs to, and as that is sharded."""
        parameter = dict(self._actor.model.named_parameters()).get(name.rpartition("/")[0])
        if parameter is not None and parameter.shape == shape:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return torch.zeros(shape, dtype=dtype)

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Continue from `state()` and `values()`. Raises ValueError for those of another optimizer or model."""
        self._optimizer.load_state({k: t for k, t in tensors.items() if not k.startswith(_CRITIC)})
        critic = {k.removeprefix(_CRITIC): t for k, t in tensors.items() if k.startswith(_CRITIC)}
        if self._critic is not None:
            self._critic.load_state(critic)
        self.kl_coef.value = values["kl_coef"]

    def _step(self, mini: ScoredBatch, totals: UpdateTotals, log: _Log, *, iteration: int) -> None:
        """One optimizer step over the rows of one mini-batch."""
        log.steps += 1
        if log.held:
            log.held_steps += 1
            return
        step_totals = UpdateTotals(totals.replayed)
        step = accumulate_gradients(
            self._actor, mini, self._config, losses=self._losses, totals=step_totals, ranks=self._ranks
        )
        if log.steps == 1 and log.reuses and step.moved is not None:
            # k3 is half the square of a small difference.
            log.sampling_gap = math.sqrt(max(0.0, 2 * step.moved))
            if log.sampling_gap > SAMPLING_GAP_BOUND:
                raise _StoredLogProbsDiffer(log.sampling_gap)
        norm = self._optimizer.gradient_norm()
        if log.skips(self._optimizer, step.loss, norm, key="optimizer", iteration=iteration):
            return
        limit = self._config.kl.early_stop
        if limit is not None and step.moved is not None and step.moved > limit:
            self._optimizer.clear_gradients()
            log.held, log.held_steps = True, log.held_steps + 1
        else:
            if self._config.kl.loss_coef > 0:
                log.kl_losses.append(step.kl)
            log.apply(self._optimizer, norm)
        totals.merge(step_totals)


def _rewards_here(config: RunConfig) -> bool:
    """True: the update looks at the KL in the rewards. A fixed penalty on whole trajectories is taken where they are
    collected."""
    return config.kl.reward_coef > 0 and (ALGORITHMS[config.algorithm].needs_critic or config.kl.target is not None)
