"""The losses that the configuration names, and the gradient of one optimizer step, pass by pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agentloop.algorithms.corrections import Correction, correct
from agentloop.algorithms.heterogeneous import StreamLoss, anchor_log_probs, heterogeneous_loss, token_weights
from agentloop.algorithms.kl import kl_estimate, kl_loss
from agentloop.algorithms.log_probs import sum_by_trajectory
from agentloop.algorithms.objectives import OBJECTIVES, Objective, ObjectiveInput, PolicyLoss, unclipped
from agentloop.config import RunConfig
from agentloop.config.sections.loss import LossSection, OwnObjective, PlainMissing, StreamLossSection
from agentloop.distributed.ranks import ALONE, Ranks
from agentloop.errors import TruncatedSampling, UnknownAnchor, UserCodeFailed, UserError
from agentloop.learning.batch import Batch, ScoredBatch, cut_micro_batches, cut_whole_trajectories
from agentloop.learning.update_stats import UpdateTotals
from agentloop.models.actor import Actor
from agentloop.user_code import load_function, users_code
from replay.records import FRESH, REPLAY, Trajectory


@dataclass(frozen=True)
class StreamLosses:
    fresh: StreamLoss
    replay: StreamLoss
    hinted: StreamLoss | None = None
    """For fresh rows sampled in sight of a hint; None: that of fresh."""

    def whole_trajectories(self, batch: Batch) -> bool:
        """True if the rows of a trajectory must stay together, by the kinds of rows that are there."""
        return bool(self._of_rows(batch, "whole_trajectories").any())

    def needs_advantage(self, batch: Batch) -> Tensor:
        """[B] bool: a token of that row and of advantage 0 adds exactly nothing."""
        return self._of_rows(batch, "needs_advantage")

    def _of_rows(self, batch: Batch, name: str) -> Tensor:
        fresh, hinted = getattr(self.fresh, name), getattr(self.hinted or self.fresh, name)
        return torch.where(batch.replay_mask, getattr(self.replay, name), torch.where(batch.hinted, hinted, fresh))


def stream_losses(section: LossSection) -> StreamLosses:
    """Runs the files of objectives of one's own. Raises UserError for a file or function that is not there."""
    return StreamLosses(**{name: _stream_loss(f"loss.{name}", part) for name, part in section.parts().items()})


def _stream_loss(where: str, section: StreamLossSection) -> StreamLoss:
    objective, missing = section.objective, section.missing_log_probs
    if isinstance(objective, OwnObjective):
        function = load_function(objective.name, what=f"{where}.objective")
        # Nobody knows what it looks at: it sees whole trajectories, and every row with a trained token.
        own = _own(function, dict(objective.options), where)
        built = StreamLoss(own, whole_trajectories=True, needs_advantage=False)
    else:
        kind = OBJECTIVES[objective.name]
        built = StreamLoss(
            partial(kind.function, **objective.model_dump(exclude={"name"})),
            whole_trajectories=kind.whole_trajectories,
            needs_advantage=kind.needs_advantage,
        )
    if isinstance(missing, PlainMissing):
        return built
    other = OBJECTIVES[missing.name]
    return replace(
        built,
        missing=partial(other.function, **missing.model_dump(exclude={"name"})),
        needs_advantage=built.needs_advantage and other.needs_advantage,
    )


def _own(function: Callable[..., Any], options: dict[str, Any], where: str) -> Objective:
    """`function` of the user's file: takes an ObjectiveInput and `options`, returns a loss per token or a PolicyLoss.

    Its loss outside the mask is dropped. Raises UserError for anything else it returns, and for its own exceptions.
    """
    name = f"{where}.objective ({function.__name__})"

    def objective(inputs: ObjectiveInput) -> PolicyLoss:
        try:
            with users_code():
                found = function(inputs, **options)
        except UserCodeFailed as failed:
            raise UserError(
                f"{name} must take an ObjectiveInput and its options, got {failed}. Mend it, and --resume if the run "
                "had begun."
            ) from failed
        result = unclipped(found) if isinstance(found, Tensor) else found
        shape = inputs.loss_mask.shape
        parts = [result.loss, result.clipped, result.clipped_lower] if isinstance(result, PolicyLoss) else []
        if not parts or any(not isinstance(part, Tensor) or part.shape != shape for part in parts):
            got = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise UserError(f"{name} must return a loss per token, a [B, T] tensor, or a PolicyLoss, got {got}.")
        zero = torch.zeros_like(inputs.log_probs)
        constant = inputs.log_probs.requires_grad and not result.loss.requires_grad
        if constant and bool((result.loss[inputs.loss_mask] != 0).any()):
            raise UserError(
                f"{name} must return a loss with a gradient, got a constant. Compute it from inputs.log_probs, without "
                "detach, item or numpy."
            )
        return PolicyLoss(
            torch.where(inputs.loss_mask, result.loss.to(zero.dtype), zero),
            result.clipped.bool() & inputs.loss_mask,
            result.clipped_lower.bool() & inputs.loss_mask,
        )

    return objective


def check_behavior(batch: Batch, config: RunConfig) -> None:
    """Refuse behavior log-probs that are no denominator: unknown ones, and those of a truncated distribution.

    Any number in the place of an unknown one would be a made-up ratio. With top-p or top-k, the stored ones are of a
    distribution that the recomputed ones are not of. A KL loss whose gradient is weighed by importance has a ratio too,
    where unknown ones are replaced by the old ones.
    """
    loss = config.loss
    weighs_kl = config.kl.loss_coef > 0 and config.kl.loss_gradient == "importance"
    unknown = (batch.loss_mask & ~batch.behavior_log_probs.isfinite()).sum(dim=1)
    for row in unknown.nonzero()[:, 0].tolist():
        if _is_relabelled(batch.members[int(batch.trajectory[row])].trajectory):
            continue  # old log-probs are its anchor
        stream = REPLAY if batch.replay_mask[row] else "hinted" if batch.hinted[row] and loss.hinted else FRESH
        section = loss.parts()[stream]
        if section.rejects_missing:
            name = batch.trajectory_ids[int(batch.trajectory[row])]
            why = f"loss.{stream}.anchor is behavior"
            if section.anchor == "old":
                why = f"loss.{stream}.correction.kind is {section.correction.kind}"
            way = "anchor: old" if section.anchor == "behavior" else "correction.kind: none"
            raise UnknownAnchor(
                f"behavior_log_probs of trajectory {name} must be known for every trained token when {why}, "
                f"got {int(unknown[row])} unknown. Set loss.{stream}.{way}, or loss.{stream}.missing_log_probs, "
                "or do not train on it."
            )
    for item in batch.members:
        record, section = item.trajectory.record, loss.replay if item.stream == REPLAY else loss.fresh
        known = not math.isnan(record.mean_behavior_log_prob)
        truncated = known and (record.top_p < 1.0 or record.top_k > 0)
        enters = section.needs_behavior or (weighs_kl and section.anchor == "behavior")
        if truncated and enters and not section.allow_truncated_sampling:
            raise TruncatedSampling(
                f"trajectory {record.id} must be sampled from the whole distribution to be weighed by its behavior "
                f"log-probs, got top_p={record.top_p:g} and top_k={record.top_k}. Set loss.{item.stream}.anchor: old "
                f"without a correction, or loss.{item.stream}.allow_truncated_sampling: true."
            )


def _is_relabelled(row: Trajectory) -> bool:
    return any(segment.behavior_context == "relabelled" for segment in row.segments)


def corrected(scored: ScoredBatch, loss: LossSection) -> tuple[ScoredBatch, dict[str, float]]:
    """The batch with its importance weights and without rejected tokens, and what that did to either stream.

    Metrics of a stream, over its trained tokens: `missing_log_probs`, the share whose behavior policy is unknown
    (absent where there is none); with a correction `importance_weight_mean`, `importance_weight_zero`, the share of
    weight 0, and with `rejection` instead `rejected`, the share that is not trained after all.
    """
    batch, metrics = scored.batch, dict[str, float]()
    weights = torch.ones(batch.loss_mask.shape, dtype=torch.float64, device=batch.loss_mask.device)
    kept = torch.ones_like(batch.loss_mask)
    parts = loss.parts()
    apart = batch.hinted if loss.hinted else torch.zeros_like(batch.hinted)
    rows = {"fresh": ~batch.replay_mask & ~apart, "replay": batch.replay_mask, "hinted": apart}
    for stream, section in parts.items():
        positions = rows[stream].nonzero()[:, 0]
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
    batch, shares = mini.batch, _shares_of(mini, config)
    # Summed on the device: reading a number would make every pass wait.
    sums = torch.zeros(6, dtype=torch.float64, device=actor.device)
    contributing = _contributing(batch, config, losses)
    cuts = _passes(batch, contributing, losses, max_tokens=config.batch.micro_batch_tokens, packs=actor.packs)
    for cut in ranks.share(cuts):
        positions = contributing[torch.tensor(cuts[0] if cut is None else cut, device=contributing.device)]
        micro = mini.select(positions)
        if cut is None:
            _idle_pass(actor, micro.batch)
        else:
            part = shares.select(positions, micro.batch.token_ids.shape[1])
            sums += _backward(actor, micro, config, losses=losses, shares=part, totals=totals)
    totals.count_step(batch.loss_mask, batch.trajectory)
    if ranks.several:
        totals.sum_over(ranks)
    loss, kl, *fresh, replayed, tokens = ranks.sum(sums).tolist()
    moved, count = fresh if fresh[1] else (replayed, tokens)
    return StepLoss(loss, kl, moved / count if count else None)


def _idle_pass(actor: Actor, batch: Batch) -> None:
    """Keep the other ranks company in a pass through sharded weights, adding exactly 0 to every gradient."""
    log_probs, _ = actor.log_probs(
        batch.token_ids, batch.attention_mask, batch.response_mask, batch.temperature, entropy=False
    )
    torch.autograd.backward((log_probs * 0.0).sum())


def _contributing(batch: Batch, config: RunConfig, losses: StreamLosses) -> Tensor:
    """Positions of the rows with a gradient: those with an advantage, or with a trained token if all are
    regularised or trained without one; and for an objective of whole trajectories the others of theirs.

    Every other row adds exactly 0 to the loss and to its gradient.
    """
    regularised = config.kl.loss_coef > 0 or config.loss.entropy_coef > 0
    needs_advantage = losses.needs_advantage(batch)[:, None] & (not regularised)
    contributes = (batch.loss_mask & ((batch.advantages != 0) | ~needs_advantage)).any(dim=1)
    if losses.whole_trajectories(batch):
        trained = sum_by_trajectory(contributes[:, None], batch.trajectory, batch.num_trajectories) > 0
        contributes = trained[batch.trajectory] & batch.loss_mask.any(dim=1)
    return contributes.nonzero()[:, 0]


def _passes(batch: Batch, positions: Tensor, losses: StreamLosses, *, max_tokens: int, packs: bool) -> list[list[int]]:
    """Indices into `positions`, which are rows, for each forward-backward pass."""
    lengths = batch.attention_mask[positions].sum(dim=1).tolist()
    if not losses.whole_trajectories(batch):
        return cut_micro_batches(lengths, max_tokens, packs=packs)
    return cut_whole_trajectories(lengths, batch.trajectory[positions].tolist(), max_tokens, packs=packs)


@dataclass(frozen=True)
class _Shares:
    """What the rows are in the whole optimizer step, and the anchors of their ratios."""

    weights: Tensor
    """[B, T]: of each token."""
    own_weights: Tensor
    """[B, T]: as if its stream were alone."""
    anchors: Tensor
    """[B, T] nats."""
    signal: Tensor
    """[B]: share of the trajectories of the row's stream with an advantage."""

    def select(self, positions: Tensor, width: int) -> _Shares:
        weights, own_weights, anchors = (
            whole[positions, :width] for whole in (self.weights, self.own_weights, self.anchors)
        )
        return _Shares(weights, own_weights, anchors, self.signal[positions])


def _shares_of(mini: ScoredBatch, config: RunConfig) -> _Shares:
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
        anchors=anchor_log_probs(
            mini.old_log_probs,
            batch.behavior_log_probs,
            replay_mask=batch.replay_mask,
            fresh=loss.fresh.anchor,
            replay=loss.replay.anchor,
            hinted=None if loss.hinted is None else (batch.hinted, loss.hinted.anchor),
        ),
        signal=batch.signal_share,
    )


def _backward(
    actor: Actor, micro: ScoredBatch, config: RunConfig, *, losses: StreamLosses, shares: _Shares, totals: UpdateTotals
) -> Tensor:
    """One forward-backward pass: [6] its share of the loss, of the KL, and what `_moved` counts."""
    batch, section = micro.batch, config.loss
    log_probs, entropies = actor.log_probs(
        batch.token_ids, batch.attention_mask, batch.response_mask, batch.temperature, entropy=section.entropy_coef > 0
    )
    inputs = batch.objective_input(log_probs, shares.anchors, signal_share=shares.signal)
    result = heterogeneous_loss(
        inputs,
        replay_mask=batch.replay_mask,
        fresh=losses.fresh,
        replay=losses.replay,
        hinted=None if losses.hinted is None else (batch.hinted, losses.hinted),
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
    moved = _moved(log_probs.detach(), micro)
    totals.add(result, batch.loss_mask, weights=shares.own_weights, trajectory=batch.trajectory)
    return torch.cat([torch.stack([loss.detach(), kl.detach()]), moved])


def _moved(log_probs: Tensor, micro: ScoredBatch) -> Tensor:
    """[4]: sum of k3 against the old log-probs, and number, of fresh trained tokens; then of replayed ones."""
    mask, replayed = micro.batch.loss_mask, micro.batch.replay_mask[:, None]
    distance = kl_estimate(micro.old_log_probs, log_probs, mask, "k3").double()
    masks = torch.stack([mask & ~replayed, mask & replayed])
    return torch.stack([(distance * masks).sum(dim=(1, 2)), masks.sum(dim=(1, 2)).double()], dim=1).flatten()
