"""The gradient of one optimizer step, pass by pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentloop.algorithms.aggregation import Normalise, token_weights
from agentloop.algorithms.heterogeneous import anchor_log_probs, heterogeneous_loss
from agentloop.algorithms.kl import kl_estimate, kl_loss
from agentloop.algorithms.ratios import sum_by_trajectory
from agentloop.config import RunConfig
from agentloop.distributed.ranks import ALONE, Ranks
from agentloop.learning.batch import Batch, cut_micro_batches, cut_whole_trajectories
from agentloop.learning.scoring import ScoredBatch
from agentloop.learning.stream_losses import StreamLosses
from agentloop.learning.update_stats import UpdateTotals
from agentloop.models.actor import Actor


@dataclass(frozen=True)
class StepLoss:
    """The loss of one optimizer step, over all its passes."""

    loss: float
    """What was differentiated."""
    kl: float
    """Aggregated KL to the reference, before its coefficient; 0 without a reference."""
    moved: float | None
    """How far the policy is from the old one, k3 in nats: mean over the fresh rows' trained tokens, which the old
    policy is taken to have sampled; over the replayed ones' if there are no others, None if there are none at all."""


def accumulate_gradients(
    actor: Actor,
    mini: ScoredBatch,
    config: RunConfig,
    *,
    losses: StreamLosses,
    totals: UpdateTotals,
    ranks: Ranks = ALONE,
) -> StepLoss:
    """Add the gradient of the mini-batch's loss to the actor's parameters, and count its tokens in `totals`.

    The loss is the sum of (policy loss x importance weight + kl.loss_coef x KL - loss.entropy_coef x entropy) x weight
    over trained tokens; a token's weight is its share in the whole step, so that cutting it into passes changes
    speed and memory only, times its row's `loss_weights`. Rows that can't contribute are left out of the
    passes and stay in every denominator. An objective of whole trajectories gets all rows of one in the same pass,
    which then holds at least one trajectory, whatever `batch.micro_batch_tokens` is. Several ranks share the passes;
    the sharded gradients and the result are sums over all of them.
    """
    batch = mini.batch
    totals.begin_step(batch.loss_mask, batch.trajectory)
    weights = _weights(batch, config, normalise=config.loss.normalise, replay_weight=config.replay.weight)
    own_weights = _weights(batch, config, normalise="per_stream", replay_weight=1.0)
    # Summed on the device: reading a number would make every pass wait.
    loss, kl = torch.zeros(2, dtype=torch.float64, device=actor.device)
    moved = torch.zeros((2, 2), dtype=torch.float64, device=actor.device)
    contributing = _contributing(batch, config, losses)
    signal_share = batch.signal_share
    max_tokens = config.batch.micro_batch_tokens
    cuts = _passes(batch, contributing, losses, max_tokens=max_tokens, packs=actor.packs)
    for cut in ranks.share(cuts):
        positions = contributing[torch.tensor(cuts[0] if cut is None else cut, device=contributing.device)]
        micro = mini.select(positions)
        if cut is None:
            _idle_pass(actor, micro.batch)
            continue
        width = micro.batch.token_ids.shape[1]
        pass_loss, pass_kl, pass_moved = _backward(
            actor,
            micro,
            config,
            losses=losses,
            shares=_Shares(weights[positions, :width], own_weights[positions, :width], signal_share[positions]),
            totals=totals,
        )
        loss += pass_loss
        kl += pass_kl
        moved += pass_moved
    sums = ranks.sum(torch.cat([loss[None], kl[None], moved.flatten()])).tolist()
    totals.sum_over(ranks)
    distances = [(sums[2], sums[3]), (sums[4], sums[5])]
    return StepLoss(sums[0], sums[1], next((s / n for s, n in distances if n), None))


def _idle_pass(actor: Actor, batch: Batch) -> None:
    """Keep the other ranks company in a pass through sharded weights, adding exactly 0 to every gradient."""
    log_probs, _ = actor.log_probs(
        batch.token_ids, batch.attention_mask, batch.response_mask, batch.temperature, entropy=False
    )
    torch.autograd.backward((log_probs * 0.0).sum())


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


def _contributing(batch: Batch, config: RunConfig, losses: StreamLosses) -> Tensor:
    """Positions of the rows with a gradient: those with an advantage, or with a trained token if all are
    regularised or trained without one; and for an objective of whole trajectories the others of theirs.

    Every other row adds exactly 0 to the loss and to its gradient.
    """
    regularised = config.kl.loss_coef > 0 or config.loss.entropy_coef > 0
    needs_advantage = losses.needs_advantage(batch.replay_mask)[:, None] & (not regularised)
    contributes = (batch.loss_mask & ((batch.advantages != 0) | ~needs_advantage)).any(dim=1)
    if losses.whole_trajectories(batch.replay_mask):
        trained = sum_by_trajectory(contributes[:, None], batch.trajectory, batch.num_trajectories) > 0
        contributes = trained[batch.trajectory] & batch.loss_mask.any(dim=1)
    return contributes.nonzero()[:, 0]


def _passes(batch: Batch, positions: Tensor, losses: StreamLosses, *, max_tokens: int, packs: bool) -> list[list[int]]:
    """Indices into `positions`, which are rows, for each forward-backward pass."""
    lengths = batch.attention_mask[positions].sum(dim=1).tolist()
    if not losses.whole_trajectories(batch.replay_mask):
        return cut_micro_batches(lengths, max_tokens, packs=packs)
    return cut_whole_trajectories(lengths, batch.trajectory[positions].tolist(), max_tokens, packs=packs)


@dataclass(frozen=True)
class _Shares:
    """What the rows of one pass are in the whole step."""

    weights: Tensor
    """[B, T]: of each token."""
    own_weights: Tensor
    """[B, T]: as if its stream were alone."""
    signal: Tensor
    """[B]: of the trajectories of the row's stream with an advantage."""


def _backward(
    actor: Actor,
    micro: ScoredBatch,
    config: RunConfig,
    *,
    losses: StreamLosses,
    shares: _Shares,
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
    inputs = batch.objective_input(log_probs, _anchors(micro, config), signal_share=shares.signal)
    result = heterogeneous_loss(
        inputs,
        replay_mask=batch.replay_mask,
        fresh=losses.fresh,
        replay=losses.replay,
        importance_weights=micro.importance_weights,
    )
    weights = shares.weights
    loss = (result.policy.loss * weights).sum()
    kl = torch.zeros_like(loss)
    if config.kl.loss_coef > 0 and micro.ref_log_probs is not None:
        kl_tokens = kl_loss(
            log_probs,
            micro.ref_log_probs,
            batch.loss_mask,
            anchors=inputs.anchors,
            estimator=config.kl.loss_estimator,
            gradient=config.kl.loss_gradient,
        )
        kl = (kl_tokens * weights).sum()
        loss = loss + config.kl.loss_coef * kl
    if section.entropy_coef > 0:
        loss = loss - section.entropy_coef * (entropies * weights).sum()
    if not loss.requires_grad:
        # An objective of one's own that trains none of these rows may give a plain 0; other ranks wait for the pass.
        loss = loss + (log_probs * 0.0).sum()
    torch.autograd.backward(loss)
    totals.add(result, batch.loss_mask, weights=shares.own_weights, trajectory=batch.trajectory)
    return loss.detach(), kl.detach(), _moved(log_probs.detach(), micro)


def _moved(log_probs: Tensor, micro: ScoredBatch) -> Tensor:
    """[2, 2]: of fresh and of replayed trained tokens, the sum of k3 against the old log-probs, and their number."""
    mask, replayed = micro.batch.loss_mask, micro.batch.replay_mask[:, None]
    distance = kl_estimate(micro.old_log_probs, log_probs, mask, "k3").double()
    masks = torch.stack([mask & ~replayed, mask & replayed])
    return torch.stack([(distance * masks).sum(dim=(1, 2)), masks.sum(dim=(1, 2)).double()], dim=1)


def _anchors(scored: ScoredBatch, config: RunConfig) -> Tensor:
    return anchor_log_probs(
        scored.old_log_probs,
        scored.batch.behavior_log_probs,
        replay_mask=scored.batch.replay_mask,
        fresh=config.loss.fresh.anchor,
        replay=config.loss.replay.anchor,
    )
