"""From a scored batch to advantages and returns: what a critic adds before the first optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from agentloop.algorithms.advantages import returns
from agentloop.algorithms.gae import at_last_action_token, gae, whitened
from agentloop.algorithms.kl import kl_estimate, kl_penalised_rewards
from agentloop.config import RunConfig
from agentloop.learning.batch import Batch, BatchRow
from agentloop.learning.mini_batches import cut_micro_batches
from agentloop.learning.scoring import ScoredBatch, Valued
from agentloop.models.critic import Critic
from agentloop.stop_reasons import CUT_OFF


def valued(
    scored: ScoredBatch, rows: Sequence[BatchRow], critic: Critic, config: RunConfig, *, kl_coef: float
) -> ScoredBatch:
    """The batch with values under the critic as it is, and with advantages and returns by GAE.

    The same for fresh and replayed rows: whatever advantage a row is stored with is replaced. The KL penalty is that
    of the old log-probs against the reference's; without a reference there is none.
    """
    batch, section = scored.batch, config.critic
    values, behind = state_values(critic, batch, max_tokens=config.batch.micro_batch_tokens)
    scores = at_last_action_token(_scores(rows, values), batch.response_mask, batch.trajectory)
    rewards = scores
    if scored.ref_log_probs is not None:
        kl = kl_estimate(scored.old_log_probs, scored.ref_log_probs, batch.response_mask, config.kl.reward_estimator)
        rewards = kl_penalised_rewards(scores, kl.to(scores.dtype), kl_coef)
    advantages = gae(
        rewards,
        values,
        response_mask=batch.response_mask,
        trajectory=batch.trajectory,
        bootstrap=_bootstrap(rows, behind, batch) * section.bootstrap_truncated,
        gamma=section.gamma,
        gae_lambda=section.gae_lambda,
    )
    used = torch.where(batch.loss_mask, advantages, 0.0)
    if section.whiten_advantages:
        fresh = batch.loss_mask & ~batch.replay_mask[:, None]
        used = whitened(advantages, batch.loss_mask, fresh if bool(fresh.any()) else batch.loss_mask)
    return replace(
        scored,
        batch=replace(batch, advantages=used.float()),
        valued=Valued(scores, rewards, values, returns(advantages, values)),
    )


@torch.no_grad()
def state_values(critic: Critic, batch: Batch, *, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Values before the action tokens of all rows, [B, T], and behind their last tokens, [B], in passes of
    `max_tokens`."""
    values = torch.zeros(batch.token_ids.shape, dtype=critic.dtype, device=critic.device)
    behind = values.new_zeros(len(values))
    for positions in cut_micro_batches(batch.lengths, max_tokens, packs=critic.packs):
        index = torch.tensor(positions, device=critic.device)
        part = batch.rows(index)
        found, ends = critic.values(part.token_ids, part.attention_mask, part.response_mask)
        values[index, : part.token_ids.shape[1]], behind[index] = found, ends
    return values, behind


def _scores(rows: Sequence[BatchRow], like: Tensor) -> Tensor:
    """[N]: what each episode was worth."""
    return like.new_tensor([row.trajectory.record.reward for row in rows])


def _bootstrap(rows: Sequence[BatchRow], behind: Tensor, batch: Batch) -> Tensor:
    """[N] value of the state that a limit cut each trajectory off in; 0 of those that ended."""
    last = torch.zeros(len(rows), dtype=torch.int64, device=behind.device)
    positions = torch.arange(len(behind), device=behind.device)
    last.scatter_reduce_(0, batch.trajectory, positions, "amax")
    cut = [row.trajectory.record.stop_reason in CUT_OFF for row in rows]
    return torch.where(torch.tensor(cut, device=behind.device), behind[last], 0.0)


def mean_reward_kl(scored: ScoredBatch, config: RunConfig) -> float | None:
    """KL to the reference per fresh action token as the rewards see it, in nats; None where there is none to see."""
    batch = scored.batch
    fresh = batch.response_mask & ~batch.replay_mask[:, None]
    if scored.ref_log_probs is None or not bool(fresh.any()):
        return None
    kl = kl_estimate(scored.old_log_probs, scored.ref_log_probs, fresh, config.kl.reward_estimator)
    return float(kl.double().sum() / fresh.sum())
