"""Updates the weights by one batch of fresh and replayed rows, with one heterogeneous loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from agentloop.algorithms.catalog import ALGORITHMS
from agentloop.algorithms.kl import kl_estimate
from agentloop.config import RunConfig
from agentloop.distributed.ranks import ALONE, Ranks
from agentloop.distributed.tensor_files import read_tensors, write_tensors
from agentloop.learning.batch import Batch, ScoredBatch, build_batch, plan_optimizer_steps
from agentloop.learning.critic_update import CriticLearner, CriticLog, value_metrics, with_values
from agentloop.learning.optimizer import RECOMPUTED, PolicyLog, WeightOptimizer
from agentloop.learning.passes import accumulate_gradients, check_behavior, corrected, score_batch
from agentloop.learning.stream_losses import stream_losses
from agentloop.learning.update_stats import UpdateResult, UpdateTotals, drift_of, fresh_entropy, update_result
from agentloop.models.actor import Actor
from agentloop.models.critic import Critic
from agentloop.models.memory import choose_checkpointing, memory_suffices
from context.authors import AuthorTable
from replay.records import BatchRow

SAMPLING_GAP_BOUND = 1e-3
"""Nats: beyond it, log-probs that were stored when a row was sampled do not stand for old ones."""


@dataclass
class _Steps:
    """The optimizer steps of one update."""

    iteration: int
    totals: UpdateTotals
    policy: PolicyLog = field(default_factory=PolicyLog)
    critic: CriticLog = field(default_factory=CriticLog)


_CRITIC = "critic."
"""Begins the names of the critic's tensors in a checkpoint; no parameter of a policy begins so."""


class Trainer:
    """Updates the actor's weights in place and owns its optimizer. Its only randomness is the seeded plan."""

    def __init__(
        self, actor: Actor, config: RunConfig, *, authors: AuthorTable, reference: Actor | None, ranks: Ranks = ALONE
    ) -> None:
        """On several `ranks` the actor is sharded over them, and each makes the same calls with the same arguments."""
        self._actor, self._config, self._authors = actor, config, authors
        self._reference, self._ranks = reference, ranks
        self._parts, self._losses = config.loss.parts(), stream_losses(config.loss)
        self._optimizer = WeightOptimizer(actor.model, config.optimizer)
        self._critic: CriticLearner | None = None
        if ALGORITHMS[config.algorithm].needs_critic:
            self._critic = CriticLearner(Critic(actor), config)
        self._penalises = self._critic is not None and config.kl.reward_coef > 0
        """Whether updates take the KL from the rewards. Without a critic, trajectories pay when they are collected."""

    def update(self, rows: Sequence[BatchRow], *, iteration: int) -> UpdateResult:
        """Compute old log-probs of all rows, then make ppo_epochs x ceil(batch / mini_batch) optimizer steps.

        With a critic, values, KL-penalised rewards, advantages and returns are computed first. The critic makes a step
        with each of the policy's, also while the policy is held (`critic.warmup_iterations`).

        A step without a signal (a gradient of exactly 0) leaves weights, moments and step counts as they are.
        docs/reading-a-run.md explains the metrics.

        Rows that are `scored` need no pass for their old log-probs. If these differ by more than SAMPLING_GAP_BOUND
        from the log-probs of the first step's passes, the update begins again with recomputed ones.

        Raises TrainingStopped for a NaN or infinite loss or gradient, and UserError if a GPU's memory does not
        suffice. Before anything has changed, raises UserError for a trained token without the behavior log-prob that
        its ratio needs, and for one that was sampled with top-p or top-k.
        """
        batch = build_batch(rows, self._authors).to(self._actor.device)
        steps = _Steps(iteration, UpdateTotals(batch.replayed))
        check_behavior(batch, self._parts, self._config.kl)
        on_gpu = batch.token_ids.is_cuda
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._actor.device)
        with memory_suffices(self._config.batch.micro_batch_tokens):
            note = self._choose_checkpointing() if on_gpu else None
            result = self._update(batch, steps, reuse=True)
            if result is None:
                result = self._update(batch, _Steps(iteration, UpdateTotals(batch.replayed)), reuse=False)
                assert result is not None and steps.policy.sampling_gap is not None
                result.metrics.update({"actor/sampling_gap": steps.policy.sampling_gap, RECOMPUTED: 1.0})
        if on_gpu:
            result.metrics["actor/peak_memory_gb"] = torch.cuda.max_memory_allocated(self._actor.device) / 1e9
        return replace(result, note=note)

    def _choose_checkpointing(self) -> str | None:
        """Choose whether activations are kept or computed again in backward. Once they are computed again, this stays:
        other memory only grows. Several ranks must choose alike, so they keep all activations.

        The choice is reported at first, and when it changes.
        """
        passes, is_first = self._actor.passes, self._actor.kept_for_backward is None
        if passes.recomputes or self._ranks.several:
            return None
        to_come = self._optimizer.bytes_to_come()
        if self._critic is not None:
            to_come += self._critic.optimizer.bytes_to_come()
        note = choose_checkpointing(self._actor, self._config, to_come=to_come)
        if self._critic is not None:
            self._critic.critic.passes.recomputes = passes.recomputes
        return note if is_first or passes.recomputes else None

    def bytes_of_state(self) -> int:
        """Return the bytes that `save` writes after the first update."""
        return sum(part.bytes_of_state() for part in (self._optimizer, self._critic) if part is not None)

    def _update(self, batch: Batch, steps: _Steps, *, reuse: bool) -> UpdateResult | None:
        """Make the update; None: the first step found that reused log-probs differ, and no weight has changed.

        With `reuse`, rows that the current weights sampled take their behavior log-probs as old ones."""
        scored, metrics = self._score(batch, reuse=reuse)
        iteration, rows = steps.iteration, len(batch.members)
        rates = {"actor/learning_rate": self._optimizer.begin(iteration, self._config, rows=rows)}
        if self._critic is not None:
            rates["critic/learning_rate"] = self._critic.optimizer.begin(iteration, self._config, rows=rows)
            steps.policy.held = iteration <= self._config.critic.warmup_iterations
        for members in plan_optimizer_steps(batch, self._config, iteration=iteration):
            chosen = torch.tensor(members, dtype=torch.int64, device=self._actor.device)
            mini = scored.select(torch.isin(batch.trajectory, chosen).nonzero()[:, 0])
            if not self._step_policy(mini, steps):
                return None
            if self._critic is not None:
                loss = self._critic.accumulate(mini, steps.critic)
                self._critic.step(loss, steps.critic, iteration=iteration)
        made = steps.policy.metrics() | rates
        if self._critic is not None:
            made |= steps.critic.metrics()
        if self._ranks.several:
            steps.totals.sum_over(self._ranks)
        result = update_result(scored, steps.totals)
        metrics = fresh_entropy(scored) | metrics | (self._reward_kl(scored) if self._penalises else {})
        return replace(result, metrics=metrics | made | result.metrics, optimizer_steps=steps.policy.steps)

    def _score(self, batch: Batch, *, reuse: bool) -> tuple[ScoredBatch, dict[str, float]]:
        """Compute all that the batch's losses need, and metrics of it."""
        needed = self._config.kl.loss_coef > 0 or self._penalises
        assert self._reference is not None or not needed, "the configuration's KL comes with a reference"
        reference = self._reference if needed else None
        scored = score_batch(batch, self._actor, reference, self._config, reuse=reuse, ranks=self._ranks)
        metrics: dict[str, float] = {}
        if self._critic is not None:
            scored = with_values(scored, self._critic.critic, self._config)
            metrics = value_metrics(scored)
        scored, correction = corrected(scored, self._parts)
        return scored, metrics | correction

    def _step_policy(self, mini: ScoredBatch, steps: _Steps) -> bool:
        """Make one optimizer step of the policy over the rows of a mini-batch.

        False: nothing was done, because stored log-probs differ too much from the current weights' log-probs.
        """
        log, config = steps.policy, self._config
        log.steps += 1
        if log.held:
            return True
        losses, totals = self._losses, steps.totals
        step = accumulate_gradients(self._actor, mini, config, losses=losses, totals=totals, ranks=self._ranks)
        if log.steps == 1 and mini.reuses and step.moved is not None:
            # k3 is half the square of a small difference.
            log.sampling_gap = math.sqrt(max(0.0, 2 * step.moved))
            if log.sampling_gap > SAMPLING_GAP_BOUND:
                return False
        norm = self._optimizer.gradient_norm()
        log.check_finite(self._optimizer, step.loss, norm, key="optimizer", iteration=steps.iteration)
        if config.kl.loss_coef > 0:
            log.kl_losses.append(step.kl)
        log.apply(self._optimizer, norm)
        return True

    def _reward_kl(self, scored: ScoredBatch) -> dict[str, float]:
        """Measure the KL per fresh action token that was taken from the rewards."""
        fresh = scored.batch.response_mask & ~scored.batch.replay_mask[:, None]
        if scored.ref_log_probs is None or not bool(fresh.any()):
            return {}
        estimator = self._config.kl.reward_estimator
        kl = kl_estimate(scored.old_log_probs, scored.ref_log_probs, fresh, estimator).double().sum() / fresh.sum()
        return {"actor/reward_kl": float(kl)}

    def score_only(self, rows: Sequence[BatchRow]) -> UpdateResult:
        """Score rows in passes of their own, without gradient or a trace in weights, optimizer or random state.

        `drift_*` and `ess` are as in `update`. `approx_kl` is the mean of r - 1 - log r over action tokens, with the
        drift as r, because there is no other ratio without an update. There are no losses and no clip fractions.
        """
        batch = build_batch(rows, self._authors).to(self._actor.device)
        scored = score_batch(batch, self._actor, None, self._config, reuse=True, ranks=self._ranks)
        totals = UpdateTotals(scored.batch.replayed)
        drift = drift_of(scored)
        totals.scored, totals.approx_kl = drift.tokens, drift.kl_sum
        return update_result(scored, totals)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of optimizer and critic, not copies."""
        tensors = self._optimizer.state()
        if self._critic is not None:
            tensors |= {f"{_CRITIC}{name}": tensor for name, tensor in self._critic.state().items()}
        return tensors

    def save(self, folder: Path) -> None:
        """Save the tensors of `state()`; on several ranks each saves its own part."""
        write_tensors(folder, self.state(), self._ranks)

    def load(self, folder: Path) -> None:
        """Continue exactly from `save()`, whichever ranks wrote it."""
        self.load_state(read_tensors(folder, places=self._place, ranks=self._ranks))

    def _place(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Make an empty tensor on the device of its parameter, sharded in the same way."""
        parameter = dict(self._actor.model.named_parameters()).get(name.rpartition("/")[0])
        if parameter is not None and parameter.shape == shape:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return torch.zeros(shape, dtype=dtype)

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `state()`. Raises ValueError for that of another optimizer or model."""
        self._optimizer.load_state({k: t for k, t in tensors.items() if not k.startswith(_CRITIC)})
        critic = {k.removeprefix(_CRITIC): t for k, t in tensors.items() if k.startswith(_CRITIC)}
        if self._critic is not None:
            self._critic.load_state(critic)
