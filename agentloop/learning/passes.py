"""The passes of a batch through the policy: first for its log-probs, then for the gradient of each optimizer step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from agentloop.algorithms.corrections import Correction, correct
from agentloop.algorithms.heterogeneous import Kinds, anchor_log_probs, heterogeneous_loss, token_weights
from agentloop.algorithms.kl import kl_estimate, kl_loss
from agentloop.algorithms.log_probs import sum_by_trajectory
from agentloop.config import RunConfig
from agentloop.config.sections.loss import StreamLossSection
from agentloop.config.sections.optimization import KlSection
from agentloop.distributed.ranks import ALONE, Ranks
from agentloop.errors import UserError
from agentloop.learning.batch import Batch, ScoredBatch
from agentloop.learning.stream_losses import Losses
from agentloop.learning.update_stats import UpdateTotals
from agentloop.models.actor import Actor


def rows_of_parts(batch: Batch, parts: Collection[str]) -> dict[str, Tensor]:
    """Find the rows, [B] bool, of each part, by its name: `fresh`, `replay` or `hinted`.

    Hinted rows belong to `fresh` if they have no part of their own.
    """
    apart = batch.hinted & ("hinted" in parts)
    rows = {"fresh": ~batch.replay_mask & ~apart, "replay": batch.replay_mask, "hinted": apart}
    return {name: rows[name] for name in parts}


def _kinds_of(batch: Batch, losses: Losses) -> Kinds:
    return [(rows, losses[name]) for name, rows in rows_of_parts(batch, losses).items()]


def check_behavior(batch: Batch, parts: Mapping[str, StreamLossSection], kl: KlSection) -> None:
    """Refuse ratios to a behavior log-prob that is unknown, or that comes from a truncated distribution.

    Without the log-prob of a token, its ratio is unknown. Under top-p or top-k the stored log-probs may belong to
    another distribution than the recomputed ones. A KL loss with `importance` gradient has a ratio too; there old
    log-probs replace unknown ones.
    """
    weighs_kl = kl.loss_coef > 0 and kl.loss_gradient == "importance"
    unknown = (batch.loss_mask & ~batch.behavior_log_probs.isfinite()).sum(dim=1).tolist()
    owners = batch.trajectory.tolist()
    for stream, rows in rows_of_parts(batch, parts).items():
        section = parts[stream]
        for row in rows.nonzero()[:, 0].tolist():
            trajectory = batch.members[owners[row]].trajectory
            # Relabelled rows have the old log-probs as their anchor.
            relabelled = any(segment.behavior_context == "relabelled" for segment in trajectory.segments)
            if unknown[row] and section.rejects_missing and not relabelled:
                why, way = f"loss.{stream}.anchor is behavior", "anchor: old"
                if section.anchor == "old":
                    why, way = f"loss.{stream}.correction.kind is {section.correction.kind}", "correction.kind: none"
                raise UserError(
                    f"behavior_log_probs of trajectory {trajectory.id} must be known for every trained token when "
                    f"{why}, got {unknown[row]} unknown. Set loss.{stream}.missing_log_probs, or do not train on it; a "
                    f"new run can have loss.{stream}.{way}."
                )
            record = trajectory.record
            truncated = record.top_p < 1.0 or record.top_k > 0
            if not truncated or math.isnan(record.mean_behavior_log_prob):
                continue
            if section.needs_behavior or (weighs_kl and section.anchor == "behavior"):
                raise UserError(
                    f"trajectory {record.id} must be sampled from the whole distribution to be weighed by its behavior "
                    f"log-probs, got top_p={record.top_p:g} and top_k={record.top_k}. Remove it from the buffer; a new "
                    f"run can have loss.{stream}.anchor: old without a correction."
                )


@torch.no_grad()
def score(
    actor: Actor, batch: Batch, *, max_tokens: int, known: Tensor | None = None, ranks: Ranks = ALONE
) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropies of all rows' action tokens, [B, T] nats, in passes of `max_tokens`.

    `known` rows, [B] bool, need no pass: they get their stored log-probs, and NaN as entropies. Several ranks share the
    passes, and all of them get all results.
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
    """Return the batch, on the actor's device, with its old log-probs, and the reference's if there is one.

    `reuse`: rows sampled by the current weights need no pass, because their behavior log-probs are their old ones.
    """
    max_tokens = config.batch.micro_batch_tokens
    stored = reusable_rows(batch) if reuse else torch.zeros_like(batch.replay_mask)
    old, entropies = score(actor, batch, max_tokens=max_tokens, known=stored, ranks=ranks)
    ref = None if reference is None else score(reference, batch, max_tokens=max_tokens, ranks=ranks)[0]
    return ScoredBatch(batch, old, ref, entropies=entropies, reuses=bool(stored.any()))


def reusable_rows(batch: Batch) -> Tensor:
    """Find the rows, [B] bool, that the current weights sampled: behavior and old log-probs are equal."""
    flags = torch.tensor([member.scored for member in batch.members], device=batch.trajectory.device)[batch.trajectory]
    return flags & ~(batch.behavior_log_probs.isnan() & batch.response_mask).any(dim=1)


def corrected(scored: ScoredBatch, parts: Mapping[str, StreamLossSection]) -> tuple[ScoredBatch, dict[str, float]]:
    """Add importance weights to the batch and leave out rejected tokens; also return metrics of both streams.

    The metrics are over a stream's trained tokens. `missing_log_probs` is the share of unknown behavior log-probs
    (absent if none is unknown). With a correction, `importance_weight_mean` is the mean weight and
    `importance_weight_zero` the share of weight 0. With `rejection`, `rejected` is the share of rejected tokens.
    """
    batch, metrics = scored.batch, dict[str, float]()
    weights = torch.ones(batch.loss_mask.shape, dtype=torch.float64, device=batch.loss_mask.device)
    kept = torch.ones_like(batch.loss_mask)
    for stream, rows in rows_of_parts(batch, parts).items():
        section, positions = parts[stream], rows.nonzero()[:, 0]
        trained = batch.loss_mask[positions]
        if not bool(trained.any()):
            continue
        unknown = ~batch.behavior_log_probs[positions][trained].isfinite()
        if bool(unknown.any()):
            metrics[f"actor/{stream}/missing_log_probs"] = float(unknown.double().mean())
        if section.correction.kind == "none":
            continue
        found = correct(
            scored.old_log_probs[positions],
            batch.behavior_log_probs[positions],
            response_mask=batch.response_mask[positions],
            trajectory=batch.trajectory[positions],
            correction=Correction(**section.correction.model_dump()),
        )
        weights[positions], kept[positions] = found.weights, found.kept
        if section.correction.kind == "rejection":
            metrics[f"actor/{stream}/rejected"] = float((~found.kept)[trained].double().mean())
        else:
            metrics[f"actor/{stream}/importance_weight_mean"] = float(found.weights[trained].mean())
            metrics[f"actor/{stream}/importance_weight_zero"] = float((found.weights[trained] == 0).double().mean())
    if all(section.correction.kind == "none" for section in parts.values()):
        return scored, metrics
    remaining = replace(batch, loss_mask=batch.loss_mask & kept, advantages=torch.where(kept, batch.advantages, 0.0))
    return replace(scored, batch=remaining, importance_weights=weights), metrics


@dataclass(frozen=True)
class StepLoss:
    """The loss of one optimizer step, over all its passes."""

    loss: float
    """The loss whose gradient was taken."""
    kl: float
    """Aggregated KL to the reference, before its coefficient; 0 without a reference."""
    moved: float | None
    """The distance from the old policy: mean k3 in nats over the fresh rows' trained tokens, as if the old policy had
    sampled them. None: no fresh token is trained, or no old log-probs were stored."""


def accumulate_gradients(
    actor: Actor, mini: ScoredBatch, config: RunConfig, *, losses: Losses, totals: UpdateTotals, ranks: Ranks = ALONE
) -> StepLoss:
    """Add the gradient of the mini-batch's loss to the actor's parameters, and count its tokens in `totals`.

    The loss is the sum of (policy loss x importance weight + kl.loss_coef x KL - loss.entropy_coef x entropy) x weight
    over trained tokens. A token's weight is its share in the whole step times its row's `loss_weights`, so cutting the
    step into passes changes only speed and memory. Rows that can't contribute are in no pass, but in every denominator.
    An objective of whole trajectories gets all rows of a trajectory in one pass, even beyond
    `batch.micro_batch_tokens`. Several ranks share the passes; gradients and result are sums over all ranks.
    """
    batch, kinds = mini.batch, _kinds_of(mini.batch, losses)
    whole = bool(_rows_where(kinds, "whole_trajectories").any())
    contributing = _contributing(batch, config, kinds, whole=whole)
    shares = _shares_of(mini, config, kinds)
    # The device sums: reading a number would make every pass wait.
    sums = torch.zeros(4, dtype=torch.float64, device=actor.device)
    passes = batch.passes(contributing, max_tokens=config.batch.micro_batch_tokens, packs=actor.packs, whole=whole)
    for own in ranks.share(passes):
        positions = passes[0] if own is None else own
        micro = mini.select(positions)
        if own is None:
            _idle_pass(actor, micro.batch)
        else:
            part = shares.select(positions, micro.batch.token_ids.shape[1])
            sums += _backward(actor, micro, config, losses=losses, shares=part, totals=totals)
    totals.count_step(batch.loss_mask, batch.trajectory)
    loss, kl, moved, count = ranks.sum(sums).tolist()
    return StepLoss(loss, kl, moved / count if count else None)


def _idle_pass(actor: Actor, batch: Batch) -> None:
    """Take part in the other ranks' pass through sharded weights, adding exactly 0 to every gradient."""
    log_probs, _ = actor.log_probs(
        batch.token_ids, batch.attention_mask, batch.response_mask, batch.temperature, entropy=False
    )
    torch.autograd.backward((log_probs * 0.0).sum())


def _rows_where(kinds: Kinds, name: str) -> Tensor:
    """Find the rows, [B] bool, whose loss has this property."""
    return torch.stack([rows & getattr(loss, name) for rows, loss in kinds]).any(dim=0)


def _contributing(batch: Batch, config: RunConfig, kinds: Kinds, *, whole: bool) -> Tensor:
    """Find the rows, [B] bool, with a gradient.

    A row has one if a trained token has an advantage. With a regulariser, or a loss that needs no advantage, any
    trained token is enough. For an objective of whole trajectories, all rows of a trajectory count if one does.
    """
    regularised = config.kl.loss_coef > 0 or config.loss.entropy_coef > 0
    needs_advantage = _rows_where(kinds, "needs_advantage")[:, None] & (not regularised)
    contributes = (batch.loss_mask & ((batch.advantages != 0) | ~needs_advantage)).any(dim=1)
    if whole:
        trained = sum_by_trajectory(contributes[:, None], batch.trajectory, len(batch.members)) > 0
        contributes = trained[batch.trajectory] & batch.loss_mask.any(dim=1)
    return contributes


@dataclass(frozen=True)
class _Shares:
    """The weights of tokens in the whole optimizer step, and the anchors of their ratios."""

    weights: Tensor
    """[B, T]: a token's weight."""
    own_weights: Tensor
    """[B, T]: a token's weight if its stream were alone."""
    anchors: Tensor
    """[B, T] nats."""
    signal: Tensor
    """[B]: share of the trajectories of the row's stream with an advantage."""

    def select(self, positions: Tensor, width: int) -> _Shares:
        weights, own, anchors = (each[positions, :width] for each in (self.weights, self.own_weights, self.anchors))
        return _Shares(weights, own, anchors, self.signal[positions])


def _shares_of(mini: ScoredBatch, config: RunConfig, kinds: Kinds) -> _Shares:
    batch, loss = mini.batch, config.loss
    weights_by = partial(
        token_weights,
        batch.loss_mask,
        batch.trajectory,
        replay_mask=batch.replay_mask,
        mode=loss.aggregation,
        norm_length=loss.norm_length,
    )
    row_weights = batch.loss_weights[:, None]
    return _Shares(
        weights=weights_by(normalise=loss.normalise, replay_weight=config.replay.weight) * row_weights,
        own_weights=weights_by(normalise="per_stream", replay_weight=1.0) * row_weights,
        anchors=anchor_log_probs(mini.old_log_probs, batch.behavior_log_probs, kinds),
        signal=batch.signal_share,
    )


def _backward(
    actor: Actor, micro: ScoredBatch, config: RunConfig, *, losses: Losses, shares: _Shares, totals: UpdateTotals
) -> Tensor:
    """Run one forward-backward pass. Returns [4]: the pass's loss and KL, then the two numbers of `_moved`."""
    batch, section = micro.batch, config.loss
    kinds = _kinds_of(batch, losses)
    log_probs, entropies = actor.log_probs(
        batch.token_ids, batch.attention_mask, batch.response_mask, batch.temperature, entropy=section.entropy_coef > 0
    )
    inputs = batch.objective_input(log_probs, shares.anchors, signal_share=shares.signal)
    policy = heterogeneous_loss(inputs, kinds, importance_weights=micro.importance_weights)
    weights = shares.weights
    loss = (policy.loss * weights).sum()
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
        # A user's objective may return a plain 0 if it trains none of these rows. Other ranks wait for the pass.
        loss = loss + (log_probs * 0.0).sum()
    torch.autograd.backward(loss)
    totals.add(policy, inputs, weights=shares.own_weights)
    moved = torch.zeros(2, dtype=torch.float64, device=loss.device)
    if micro.reuses:
        moved = _moved(micro, log_probs.detach())
    return torch.cat([torch.stack([loss.detach(), kl.detach()]), moved])


def _moved(micro: ScoredBatch, log_probs: Tensor) -> Tensor:
    """Return [2]: the sum of k3 to the old log-probs over the trained tokens of fresh rows, and their number."""
    fresh = micro.batch.loss_mask & ~micro.batch.replay_mask[:, None]
    moved = kl_estimate(micro.old_log_probs, log_probs, fresh, "k3").double()
    return torch.stack([moved.sum(), fresh.sum().double()])
