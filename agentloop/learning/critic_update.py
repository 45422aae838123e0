"""Teaches the critic, with one optimizer step for each of the policy's, and computes the KL penalty of rewards."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from agentloop.algorithms.catalog import ALGORITHMS
from agentloop.algorithms.gae import at_last_action_token, explained_variance, gae, value_loss, whiten_tokens
from agentloop.algorithms.kl import kl_estimate
from agentloop.algorithms.log_probs import sum_by_trajectory
from agentloop.config import RunConfig
from agentloop.learning.batch import Batch, ScoredBatch, build_batch
from agentloop.learning.optimizer import StepLog, WeightOptimizer
from agentloop.learning.passes import score
from agentloop.models.actor import Actor
from agentloop.models.critic import Critic
from agentloop.records import KlPenalty, Penalty
from context.authors import AuthorTable
from context.strategies import CONTEXT_FULL, SUMMARY_TOO_LONG
from replay.records import BatchRow, StopReason, Trajectory

_LIMITS = (StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.OVERTIME, StopReason.CALLED_LAST)
CUT_OFF = frozenset({*_LIMITS, CONTEXT_FULL, SUMMARY_TOO_LONG})
"""Stop reasons after which an episode could have continued. All others end the task itself."""


@dataclass
class CriticLog(StepLog):
    """A log of the critic's optimizer steps in one update."""

    losses: list[float] = field(default_factory=list)
    clipped: int = 0
    trained: int = 0

    def metrics(self, role: str = "critic") -> dict[str, float]:
        metrics = super().metrics(role)
        if self.losses:
            metrics["critic/vf_loss"] = sum(self.losses) / len(self.losses)
        if self.trained:
            metrics["critic/vf_clipfrac"] = self.clipped / self.trained
        return metrics


class CriticLearner:
    def __init__(self, critic: Critic, config: RunConfig) -> None:
        self.critic, self._config = critic, config
        self.optimizer = WeightOptimizer(critic.weights, config.critic.optimizer)

    def accumulate(self, mini: ScoredBatch, log: CriticLog) -> float | None:
        """Add the gradient of the mini-batch's value loss to the critic, and return the loss; None without a token.

        The loss is the mean over the trained tokens of the step's fresh rows. Cutting the step into passes changes only
        speed and memory.
        """
        batch = mini.batch
        mask = learned(batch)
        if not bool(mask.any()):
            return None
        weights = mask.double() / mask.sum()
        loss = torch.zeros((), dtype=torch.float64, device=self.critic.device)
        clipped = torch.zeros((), dtype=torch.int64, device=self.critic.device)
        max_tokens = self._config.batch.micro_batch_tokens
        for positions in batch.passes(mask.any(dim=1), max_tokens=max_tokens, packs=self.critic.packs):
            part = mini.select(positions)
            rows, width = part.batch, part.batch.token_ids.shape[1]
            assert part.values is not None and part.returns is not None, "a critic learns from its own values"
            seen = (rows.token_ids, rows.attention_mask, rows.response_mask)
            values, _ = self.critic.values(*seen)
            learns, clip = mask[positions, :width], self._config.critic.value_clip
            losses, clips = value_loss(values, part.values, part.returns, mask=learns, value_clip=clip)
            passed = (losses * weights[positions, :width]).sum()
            torch.autograd.backward(passed)
            loss += passed.detach()
            clipped += clips.sum()
        log.clipped += int(clipped)
        log.trained += int(mask.sum())
        return float(loss)

    def bytes_of_state(self) -> int:
        """Return the bytes of `state()` after the first step."""
        weights: list[Tensor] = list(self.critic.weights.state_dict().values())
        return sum(weight.nbytes for weight in weights) + self.optimizer.bytes_of_state()

    def step(self, loss: float | None, log: CriticLog, *, iteration: int) -> None:
        """Make one optimizer step. Without a gradient nothing changes; one that is not finite stops the training."""
        log.steps += 1
        if loss is None:
            self.optimizer.clear_gradients()
            log.skipped_no_signal += 1
            return
        norm = self.optimizer.gradient_norm()
        log.check_finite(self.optimizer, loss, norm, key="critic.optimizer", iteration=iteration)
        log.losses.append(loss)
        log.apply(self.optimizer, norm)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of weights and optimizer, not copies: `weights/<name>`, `optimizer/<name>/<field>`."""
        weights = {f"weights/{name}": tensor for name, tensor in self.critic.weights.state_dict().items()}
        return weights | {f"optimizer/{name}": tensor for name, tensor in self.optimizer.state().items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `state()`, exactly. Raises ValueError if it belongs to another critic."""
        weights = {k.removeprefix("weights/"): t for k, t in tensors.items() if k.startswith("weights/")}
        known = self.critic.weights.state_dict()
        if {k: t.shape for k, t in weights.items()} != {k: t.shape for k, t in known.items()}:
            raise ValueError("critic state must belong to this critic, got the weights of another one.")
        self.critic.weights.load_state_dict(weights)
        moments = {k.removeprefix("optimizer/"): t for k, t in tensors.items() if k.startswith("optimizer/")}
        self.optimizer.load_state(moments)


def learned(batch: Batch) -> Tensor:
    """Find the tokens, [B, T] bool, whose value the critic learns: replayed rows are a selection."""
    return batch.loss_mask & ~batch.replay_mask[:, None]


def value_metrics(scored: ScoredBatch) -> dict[str, float]:
    """Measure how well the critic foresaw the returns, before it learns from them."""
    assert scored.values is not None and scored.returns is not None
    mask = learned(scored.batch)
    values, targets = scored.values[mask].double(), scored.returns[mask].double()
    if len(values) == 0:
        return {}
    metrics = {"critic/value_mean": float(values.mean()), "critic/return_mean": float(targets.mean())}
    explained = explained_variance(values, targets)
    return metrics if explained is None else metrics | {"critic/explained_variance": explained}


def with_values(scored: ScoredBatch, critic: Critic, config: RunConfig) -> ScoredBatch:
    """Add the current critic's values to the batch, with advantages and returns by GAE.

    Fresh and replayed rows are treated alike: their stored advantages are replaced. The KL penalty compares old
    log-probs with the reference's; without a reference there is none.
    """
    batch, section = scored.batch, config.critic
    values, behind = state_values(critic, batch, max_tokens=config.batch.micro_batch_tokens)
    earned = values.new_tensor([member.trajectory.record.reward for member in batch.members])
    rewards = at_last_action_token(earned, batch.response_mask, batch.trajectory)
    if scored.ref_log_probs is not None:
        kl = kl_estimate(scored.old_log_probs, scored.ref_log_probs, batch.response_mask, config.kl.reward_estimator)
        rewards = rewards - config.kl.reward_coef * kl.to(rewards.dtype)
    found = gae(
        rewards,
        values,
        bootstrap=_bootstrap(batch, behind) * section.bootstrap_truncated,
        response_mask=batch.response_mask,
        trajectory=batch.trajectory,
        gamma=section.gamma,
        gae_lambda=section.gae_lambda,
    )
    advantages = found.masked_fill(~batch.loss_mask, 0.0)
    if section.whiten_advantages:
        # Replayed rows do not change fresh ones. Without fresh rows, all trained tokens are whitened together.
        fresh = learned(batch)
        advantages = whiten_tokens(found, batch.loss_mask, fresh if bool(fresh.any()) else batch.loss_mask)
    batch = replace(batch, advantages=advantages.float())
    return replace(scored, batch=batch, values=values, returns=found + values)


@torch.no_grad()
def state_values(critic: Critic, batch: Batch, *, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Values before the action tokens of all rows, [B, T], and behind their last tokens, [B], in passes of
    `max_tokens`."""
    values = torch.zeros(batch.token_ids.shape, dtype=critic.dtype, device=critic.device)
    behind = values.new_zeros(len(values))
    every = torch.ones_like(batch.replay_mask)
    for positions in batch.passes(every, max_tokens=max_tokens, packs=critic.packs):
        part = batch.select(positions)
        found, ends = critic.values(part.token_ids, part.attention_mask, part.response_mask)
        values[positions, : part.token_ids.shape[1]], behind[positions] = found, ends
    return values, behind


def _bootstrap(batch: Batch, behind: Tensor) -> Tensor:
    """Find the value of the last state of trajectories that a limit cut off, [N]; 0 for those that ended."""
    last = torch.zeros(batch.num_trajectories, dtype=torch.int64, device=behind.device)
    positions = torch.arange(len(behind), device=behind.device)
    last.scatter_reduce_(0, batch.trajectory, positions, "amax")
    cut = [member.trajectory.record.stop_reason in CUT_OFF for member in batch.members]
    return torch.where(torch.tensor(cut, device=behind.device), behind[last], 0.0)


def reward_penalty(config: RunConfig, reference: Actor | None, authors: AuthorTable) -> Penalty | None:
    """Sum over a trajectory's action tokens of `kl.reward_coef` x KL from behavior to reference, in reward units.

    Tokens without a behavior log-prob pay nothing. None with a critic, because it gets the penalty token by token.
    """
    if reference is None or config.kl.reward_coef == 0.0 or ALGORITHMS[config.algorithm].needs_critic:
        return None

    def penalty(trajectories: Sequence[Trajectory]) -> list[KlPenalty]:
        batch = build_batch([BatchRow(t) for t in trajectories], authors).to(reference.device)
        ref, _ = score(reference, batch, max_tokens=config.batch.micro_batch_tokens)
        known = batch.response_mask & batch.behavior_log_probs.isfinite()
        kl = kl_estimate(batch.behavior_log_probs.to(ref.dtype), ref, known, config.kl.reward_estimator)
        parts = torch.stack([part.double() for part in (config.kl.reward_coef * kl, kl, known)])
        sums = sum_by_trajectory(parts, batch.trajectory, batch.num_trajectories)
        return [KlPenalty(taken, nats, int(tokens)) for taken, nats, tokens in sums.T.tolist()]

    return penalty
