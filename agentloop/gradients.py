"""The gradient of one optimizer step, pass by pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentloop.algorithms.aggregation import Normalise, token_weights
from agentloop.algorithms.heterogeneous import ClipRange, anchor_log_probs, heterogeneous_loss
from agentloop.algorithms.kl import kl_estimate, kl_loss
from agentloop.batch import Batch
from agentloop.config import RunConfig
from agentloop.loss_config import StreamLossSection
from agentloop.mini_batches import cut_micro_batches
from agentloop.models.actor import Actor
from agentloop.scoring import ScoredBatch
from agentloop.update_stats import UpdateTotals


@dataclass(frozen=True)
class StepLoss:
    """Of one optimizer step, over all its passes."""

    loss: float
    """What was differentiated."""
    kl: float
    """Aggregated KL to the reference, before its coefficient; 0 without a reference."""
    moved: float | None
    """How far the policy is from the old one, k3 in nats: mean over the fresh rows' trained tokens, which the old
    policy is taken to have sampled; over the replayed ones' if there are no others, None if there are none at all."""


def accumulate_gradients(actor: Actor, mini: ScoredBatch, config: RunConfig, *, totals: UpdateTotals) -> StepLoss:
    """Add the gradient of the mini-batch's loss to the actor's parameters, and count its tokens in `totals`.

    The loss is the sum of (policy loss + kl.loss_coef x KL - loss.entropy_coef x entropy) x weight over
    trained tokens; a token's weight is its share in the whole step, so that cutting it into passes changes
    speed and memory only, times its row's `loss_weights`. Rows that can't contribute are left out of the
    passes and stay in every denominator.
    """
    batch = mini.batch
    totals.begin_step(batch.loss_mask, batch.trajectory)
    weights = _weights(batch, config, normalise=config.loss.normalise, replay_weight=config.replay.weight)
    own_weights = _weights(batch, config, normalise="per_stream", replay_weight=1.0)
    # Summed on the device: reading a number would make every pass wait.
    loss, kl = torch.zeros(2, dtype=torch.float64, device=actor.device)
    moved = torch.zeros((2, 2), dtype=torch.float64, device=actor.device)
    contributing = _contributing(batch, config)
    lengths = batch.attention_mask[contributing].sum(dim=1).tolist()
    for cut in cut_micro_batches(lengths, config.batch.micro_batch_tokens):
        positions = contributing[torch.tensor(cut, device=contributing.device)]
        micro = mini.rows(positions)
        width = micro.batch.token_ids.shape[1]
        pass_loss, pass_kl, pass_moved = _backward(
            actor,
            micro,
            config,
            weights=weights[positions, :width],
            own_weights=own_weights[positions, :width],
            totals=totals,
        )
        loss += pass_loss
        kl += pass_kl
        moved += pass_moved
    return StepLoss(float(loss), float(kl), next((s / n for s, n in moved.tolist() if n), None))


def _weights(batch: Batch, config: RunConfig, *, normalise: Normalise, replay_weight: float) -> Tensor:
    weights = token_weights(
        batch.loss_mask,
        batch.trajectory,
        replay_mask=batch.replay_mask,
        mode=config.loss.aggregation,
        norm_length=config.loss.norm_length,
        normalise=normalise,
        replay_weight=replay_weight,
    )
    return weights * batch.loss_weights[:, None]


def _contributing(batch: Batch, config: RunConfig) -> Tensor:
    """Positions of the rows with a gradient: those with an advantage, or with a trained token if all are
    regularised.

    Every other row adds exactly 0 to the loss and to its gradient.
    """
    regularised = config.kl.loss_coef > 0 or config.loss.entropy_coef > 0
    tokens = batch.loss_mask if regularised else batch.advantages != 0
    return tokens.any(dim=1).nonzero()[:, 0]


def _backward(
    actor: Actor,
    micro: ScoredBatch,
    config: RunConfig,
    *,
    weights: Tensor,
    own_weights: Tensor,
    totals: UpdateTotals,
) -> tuple[Tensor, Tensor, Tensor]:
    """One forward-backward pass: its share of the loss, of the KL, and how far the policy has moved."""
    batch, section = micro.batch, config.loss
    log_probs, entropies = actor.log_probs(
        batch.token_ids,
        batch.attention_mask,
        batch.response_mask,
        batch.temperature,
        entropy=section.entropy_coef > 0,
    )
    anchors = anchor_log_probs(
        micro.old_log_probs,
        batch.behavior_log_probs,
        replay_mask=batch.replay_mask,
        fresh=section.fresh.anchor,
        replay=section.replay.anchor,
    )
    result = heterogeneous_loss(
        log_probs,
        anchors,
        advantages=batch.advantages,
        loss_mask=batch.loss_mask,
        replay_mask=batch.replay_mask,
        fresh=_clip_range(section.fresh),
        replay=_clip_range(section.replay),
    )
    loss = (result.policy.loss * weights).sum()
    kl = torch.zeros_like(loss)
    if config.kl.loss_coef > 0 and micro.ref_log_probs is not None:
        kl_tokens = kl_loss(
            log_probs,
            micro.ref_log_probs,
            batch.loss_mask,
            anchors=anchors,
            estimator=config.kl.loss_estimator,
            gradient=config.kl.loss_gradient,
        )
        kl = (kl_tokens * weights).sum()
        loss = loss + config.kl.loss_coef * kl
    if section.entropy_coef > 0:
        loss = loss - section.entropy_coef * (entropies * weights).sum()
    torch.autograd.backward(loss)
    totals.add(result, batch.loss_mask, weights=own_weights, trajectory=batch.trajectory)
    return loss.detach(), kl.detach(), _moved(log_probs.detach(), micro)


def _moved(log_probs: Tensor, micro: ScoredBatch) -> Tensor:
    """[2, 2]: of fresh and of replayed trained tokens, the sum of k3 against the old log-probs, and their number."""
    mask, replayed = micro.batch.loss_mask, micro.batch.replay_mask[:, None]
    distance = kl_estimate(micro.old_log_probs, log_probs, mask, "k3").double()
    masks = torch.stack([mask & ~replayed, mask & replayed])
    return torch.stack([(distance * masks).sum(dim=(1, 2)), masks.sum(dim=(1, 2)).double()], dim=1)


def _clip_range(section: StreamLossSection) -> ClipRange:
    return ClipRange(section.clip_low, section.clip_high, section.dual_clip)
