"""Log-probs of a batch under the policy and the reference as they are, before the iteration's first optimizer step."""

import torch
from torch import Tensor

from agentloop.config import RunConfig
from agentloop.distributed.ranks import ALONE, Ranks
from agentloop.learning.batch import Batch, ScoredBatch
from agentloop.models.actor import Actor


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
    passes = batch.passes(wanted & ~stored, max_tokens=max_tokens, packs=actor.packs)
    for own in ranks.share(passes):
        positions = passes[0] if own is None else own
        part = batch.select(positions)
        scores = actor.log_probs(part.token_ids, part.attention_mask, part.response_mask, part.temperature)
        if own is not None:
            width = part.token_ids.shape[1]
            log_probs[positions, :width], entropies[positions, :width] = scores
    ranks.sum(log_probs)
    ranks.sum(entropies)
    of_stored = batch.response_mask & stored[:, None]
    log_probs = torch.where(of_stored, batch.behavior_log_probs.to(log_probs.dtype), log_probs)
    return log_probs, entropies.masked_fill(of_stored, torch.nan)


def score_batch(
    batch: Batch, actor: Actor, reference: Actor | None, config: RunConfig, *, reuse: bool, ranks: Ranks = ALONE
) -> ScoredBatch:
    """The batch, which is on the actor's device, with its old log-probs, and those of the reference if there is one.

    `reuse`: rows sampled by the weights as they are need no pass, for their behavior log-probs are their old ones.
    """
    max_tokens = config.batch.micro_batch_tokens
    stored = reusable_rows(batch) if reuse else torch.zeros_like(batch.replay_mask)
    old, entropies = score(actor, batch, max_tokens=max_tokens, known=stored, ranks=ranks)
    ref = None if reference is None else score(reference, batch, max_tokens=max_tokens, ranks=ranks)[0]
    return ScoredBatch(batch, old, ref, entropies=entropies, reuses=bool(stored.any()))


def reusable_rows(batch: Batch) -> Tensor:
    """[B] bool: rows whose behavior log-probs are those of the weights as they are."""
    flags = torch.tensor([member.scored for member in batch.members], device=batch.trajectory.device)[batch.trajectory]
    return flags & ~(batch.behavior_log_probs.isnan() & batch.response_mask).any(dim=1)
