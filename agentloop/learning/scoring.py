"""Log-probs of a batch under the weights as they are, without gradient: what an update starts from."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from agentloop.algorithms.ratios import Drift, log_ratios, trajectory_drift
from agentloop.config import RunConfig
from agentloop.distributed.ranks import ALONE, Ranks
from agentloop.learning.batch import Batch, cut_micro_batches
from agentloop.models.actor import Actor


@dataclass(frozen=True, eq=False)
class CriticOutputs:
    """What the critic makes of a batch; [B, T], reward units, 0 where not an action token."""

    scores: Tensor
    """The episode's reward, at its last action token."""
    rewards: Tensor
    """Scores less the KL penalty."""
    values: Tensor
    """Before the first optimizer step of the iteration."""
    returns: Tensor
    """advantages + values, before advantages are whitened: what the critic regresses on."""

    def select(self, positions: Tensor, width: int) -> CriticOutputs:
        return CriticOutputs(*(getattr(self, f.name)[positions, :width] for f in fields(self)))


@dataclass(frozen=True, eq=False)
class ScoredBatch:
    """A batch with its log-probs before the first optimizer step of the iteration."""

    batch: Batch
    old_log_probs: Tensor
    """[B, T] nats; 0 where not an action token."""
    ref_log_probs: Tensor | None
    """[B, T] nats; None where no reference is needed."""
    critic: CriticOutputs | None = None
    """None without a critic."""
    importance_weights: Tensor | None = None
    """[B, T]: what the policy loss of a token is multiplied by; None: 1."""
    entropies: Tensor | None = None
    """[B, T] nats, of the whole batch; NaN where log-probs needed no pass. Components of a batch have none."""

    def select(self, positions: Tensor) -> ScoredBatch:
        """Some of the rows, cut to the longest of them."""
        batch = self.batch.select(positions)
        width = batch.token_ids.shape[1]
        ref, critic, weights = self.ref_log_probs, self.critic, self.importance_weights
        return ScoredBatch(
            batch,
            self.old_log_probs[positions, :width],
            None if ref is None else ref[positions, :width],
            None if critic is None else critic.select(positions, width),
            None if weights is None else weights[positions, :width],
        )

    def token_log_drift(self) -> Tensor:
        """old - behavior of every action token, [B, T] nats, clamped; NaN elsewhere and where behavior is not known."""
        batch = self.batch
        known = batch.response_mask & ~batch.behavior_log_probs.isnan()
        logs = log_ratios(self.old_log_probs, batch.behavior_log_probs.to(self.old_log_probs.dtype), known)
        return torch.where(known, logs, torch.nan)

    def drift(self) -> Drift:
        """The drift of every trajectory of the batch."""
        return trajectory_drift(
            self.old_log_probs,
            self.batch.behavior_log_probs,
            response_mask=self.batch.response_mask,
            trajectory=self.batch.trajectory,
            count=self.batch.num_trajectories,
        )


@torch.no_grad()
def score(
    actor: Actor, batch: Batch, *, max_tokens: int, known: Tensor | None = None, ranks: Ranks = ALONE
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the action tokens of all rows, [B, T] nats, in passes of `max_tokens`.

    `known` rows, [B] bool, cost no pass: their log-probs are those stored with them, their entropies NaN. Several ranks
    share the passes, and all of them get all results.
    """
    log_probs = torch.zeros(batch.token_ids.shape, dtype=actor.dtype, device=actor.device)
    entropies = torch.zeros_like(log_probs)
    wanted = batch.response_mask.any(dim=1)
    stored = torch.zeros_like(wanted) if known is None else known
    positions = (wanted & ~stored).nonzero()[:, 0]
    lengths = batch.attention_mask[positions].sum(dim=1).tolist()
    cuts = cut_micro_batches(lengths, max_tokens, packs=actor.packs)
    for cut in ranks.share(cuts):
        index = positions[torch.tensor(cuts[0] if cut is None else cut, device=actor.device)]
        part = batch.select(index)
        scores = actor.log_probs(part.token_ids, part.attention_mask, part.response_mask, part.temperature)
        if cut is not None:
            width = part.token_ids.shape[1]
            log_probs[index, :width], entropies[index, :width] = scores
    ranks.sum(log_probs)
    ranks.sum(entropies)
    of_stored = batch.response_mask & stored[:, None]
    log_probs = torch.where(of_stored, batch.behavior_log_probs.to(log_probs.dtype), log_probs)
    return log_probs, entropies.masked_fill(of_stored, torch.nan)


def score_batch(
    batch: Batch, actor: Actor, reference: Actor | None, config: RunConfig, *, reuse: bool, ranks: Ranks = ALONE
) -> ScoredBatch:
    """The batch on the actor's device with its old log-probs, and those of the reference if there is one.

    `reuse`: rows sampled by the weights as they are need no pass, for their behavior log-probs are their old ones.
    """
    batch = batch.to(actor.device)
    max_tokens = config.batch.micro_batch_tokens
    stored = reusable_rows(batch) if reuse else torch.zeros_like(batch.replay_mask)
    old, entropies = score(actor, batch, max_tokens=max_tokens, known=stored, ranks=ranks)
    ref = None if reference is None else score(reference, batch, max_tokens=max_tokens, ranks=ranks)[0]
    return ScoredBatch(batch, old, ref, entropies=entropies)


def reusable_rows(batch: Batch) -> Tensor:
    """[B] bool: rows whose behavior log-probs are those of the weights as they are."""
    flags = torch.tensor([member.scored for member in batch.members], device=batch.trajectory.device)[batch.trajectory]
    return flags & ~(batch.behavior_log_probs.isnan() & batch.response_mask).any(dim=1)


def fresh_entropy(scored: ScoredBatch) -> dict[str, float]:
    """`actor/entropy` of the policy as it is: the mean over the fresh rows' action tokens.

    Of rows that needed no pass it is what was measured when they were sampled.
    """
    batch, entropies = scored.batch, scored.entropies
    assert entropies is not None
    stored = [member.trajectory.record.mean_entropy for member in batch.members]
    at_sampling = entropies.new_tensor([math.nan if value is None else value for value in stored])
    values = torch.where(entropies.isnan(), at_sampling[batch.trajectory][:, None], entropies)
    fresh = values[batch.response_mask & ~batch.replay_mask[:, None]]
    known = fresh[~fresh.isnan()]
    return {"actor/entropy": float(known.mean())} if len(known) else {}
