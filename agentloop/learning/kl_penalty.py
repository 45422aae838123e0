"""What a trajectory pays for its distance from the reference, where no critic sees it token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentloop.algorithms.kl import KlCoefficient, kl_estimate, kl_penalised_rewards
from agentloop.config import RunConfig
from agentloop.learning.batch import build_batch
from agentloop.learning.scoring import score
from agentloop.models.actor import Actor
from agentloop.records import KlPenalty, Penalty
from context.authors import AuthorTable
from replay.records import BatchRow, Trajectory


def reward_penalty(
    config: RunConfig, reference: Actor | None, authors: AuthorTable, coefficient: KlCoefficient
) -> Penalty | None:
    """Sum over a trajectory's action tokens of coefficient x KL from behavior to reference, in reward units.

    Tokens whose behavior log-prob is unknown pay nothing. None with a critic, which sees the penalty token by token.
    """
    if reference is None or config.kl.reward_coef == 0.0 or config.algorithm == "ppo":
        return None

    def penalty(trajectories: Sequence[Trajectory]) -> list[KlPenalty]:
        batch = build_batch([BatchRow(t) for t in trajectories], authors).to(reference.device)
        ref, _ = score(reference, batch, max_tokens=config.batch.micro_batch_tokens)
        known = batch.response_mask & batch.behavior_log_probs.isfinite()
        kl = kl_estimate(batch.behavior_log_probs.to(ref.dtype), ref, known, config.kl.reward_estimator)
        rewards = kl_penalised_rewards(torch.zeros_like(ref), kl, coefficient.value)
        sums = torch.zeros((3, batch.num_trajectories), dtype=torch.float64, device=ref.device)
        sums.index_add_(1, batch.trajectory, torch.stack([part.double().sum(dim=1) for part in (-rewards, kl, known)]))
        return [KlPenalty(taken, nats, int(tokens)) for taken, nats, tokens in sums.T.tolist()]

    return penalty
