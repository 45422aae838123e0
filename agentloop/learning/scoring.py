"""Log-probs of a batch under the weights as they are, without gradient: what an update starts from."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from agentloop.algorithms.diagnostics import Drift, trajectory_drift
from agentloop.algorithms.log_probs import log_ratios
from agentloop.learning.batch import Batch
from agentloop.learning.mini_batches import cut_micro_batches
from agentloop.models.actor import Actor


@dataclass(frozen=True, eq=False)
class Valued:
    """What the critic makes of a batch; [B, T], reward units, 0 where not an action token."""

    scores: Tensor
    """The episode's reward, at its last action token."""
    rewards: Tensor
    """Scores less the KL penalty."""
    values: Tensor
    """Before the first optimizer step of the iteration."""
    returns: Tensor
    """advantages + values, before advantages are whitened: what the critic regresses on."""

    def rows(self, positions: Tensor, width: int) -> Valued:
        return Valued(*(getattr(self, f.name)[positions, :width] for f in fields(self)))


@dataclass(frozen=True, eq=False)
class ScoredBatch:
    """A batch with its log-probs before the first optimizer step of the iteration."""

    batch: Batch
    old_log_probs: Tensor
    """[B, T] nats; 0 where not an action token."""
    ref_log_probs: Tensor | None
    """[B, T] nats; None where no reference is needed."""
    valued: Valued | None = None
    """None without a critic."""
    importance_weights: Tensor | None = None
    """[B, T]: what the policy loss of a token is multiplied by; None: 1."""
    entropies: Tensor | None = None
    """[B, T] nats, of the whole batch; parts of it have none."""

    def rows(self, positions: Tensor) -> ScoredBatch:
        """Some of the rows, cut to the longest of them."""
        batch = self.batch.rows(positions)
        width = batch.token_ids.shape[1]
        ref, valued, weights = self.ref_log_probs, self.valued, self.importance_weights
        return ScoredBatch(
            batch,
            self.old_log_probs[positions, :width],
            None if ref is None else ref[positions, :width],
            None if valued is None else valued.rows(positions, width),
            None if weights is None else weights[positions, :width],
        )

    def token_drift(self) -> Tensor:
        """exp(old - behavior) of every action token, [B, T]; NaN elsewhere and where behavior is not known."""
        batch = self.batch
        known = batch.response_mask & ~batch.behavior_log_probs.isnan()
        logs = log_ratios(self.old_log_probs, batch.behavior_log_probs.to(self.old_log_probs.dtype), known)
        return torch.where(known, logs.exp(), torch.nan)

    def drift(self) -> Drift:
        """Of every trajectory of the batch."""
        return trajectory_drift(
            self.old_log_probs,
            self.batch.behavior_log_probs,
            response_mask=self.batch.response_mask,
            trajectory=self.batch.trajectory,
            count=len(self.batch.trajectory_ids),
        )


@torch.no_grad()
def score(actor: Actor, batch: Batch, *, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the action tokens of all rows, [B, T] nats, in passes of `max_tokens`."""
    log_probs = torch.zeros(batch.token_ids.shape, dtype=actor.dtype, device=actor.device)
    entropies = torch.zeros_like(log_probs)
    for positions in cut_micro_batches(batch.lengths, max_tokens, packs=actor.packs):
        index = torch.tensor(positions, device=actor.device)
        part = batch.rows(index)
        scores = actor.log_probs(part.token_ids, part.attention_mask, part.response_mask, part.temperature)
        width = part.token_ids.shape[1]
        log_probs[index, :width], entropies[index, :width] = scores
    return log_probs, entropies
