"""What the configuration says of both streams' losses, made ready for an update."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agentloop.algorithms.corrections import Correction, correct
from agentloop.algorithms.heterogeneous import StreamLoss
from agentloop.algorithms.objectives import OBJECTIVES, Objective, ObjectiveInput, PolicyLoss
from agentloop.algorithms.objectives.objective import unclipped
from agentloop.config import RunConfig
from agentloop.config.sections.loss import LossSection, OwnObjective, PlainMissing, StreamLossSection
from agentloop.errors import TruncatedSampling, UnknownAnchor, UserCodeFailed, UserError
from agentloop.learning.batch import Batch
from agentloop.learning.scoring import ScoredBatch
from agentloop.user_code import load_function, users_code
from replay.records import FRESH, REPLAY, Trajectory


@dataclass(frozen=True)
class StreamLosses:
    fresh: StreamLoss
    replay: StreamLoss

    def whole_trajectories(self, replay_mask: Tensor) -> bool:
        """Whether the rows of a trajectory must stay together, by the streams that are there."""
        return bool(torch.where(replay_mask, self.replay.whole_trajectories, self.fresh.whole_trajectories).any())

    def needs_advantage(self, replay_mask: Tensor) -> Tensor:
        """[B] bool: a token of that row and of advantage 0 adds exactly nothing."""
        return torch.where(replay_mask, self.replay.needs_advantage, self.fresh.needs_advantage)


def stream_losses(section: LossSection) -> StreamLosses:
    """Runs the files of objectives of one's own. Raises UserError for a file or function that is not there."""
    return StreamLosses(_stream_loss("loss.fresh", section.fresh), _stream_loss("loss.replay", section.replay))


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
        stream, section = (REPLAY, loss.replay) if batch.replay_mask[row] else (FRESH, loss.fresh)
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
    for stream, replayed, section in ((FRESH, False, loss.fresh), (REPLAY, True, loss.replay)):
        positions = (batch.replay_mask == replayed).nonzero()[:, 0]
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
    if "none" == loss.fresh.correction.kind == loss.replay.correction.kind:
        return scored, metrics
    remaining = replace(batch, loss_mask=batch.loss_mask & kept, advantages=torch.where(kept, batch.advantages, 0.0))
    return replace(scored, batch=remaining, importance_weights=weights), metrics
