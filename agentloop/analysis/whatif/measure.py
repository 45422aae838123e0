"""What each of several objectives would have done with stored trajectories: one optimizer step, computed, not made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from agentloop.algorithms.log_probs import sum_by_trajectory
from agentloop.algorithms.objectives import ObjectiveInput, PolicyLoss
from agentloop.analysis.stored_log_probs import compute_asked, load_weights, weights_of_run
from agentloop.analysis.whatif.compared_rows import RowChoice, advantages_in_words, bucket_of, buckets_of, choose_rows
from agentloop.analysis.whatif.losses import WhatIfLoss
from agentloop.analysis.whatif.result import ALL, Effect, PartData, WhatIf
from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.learning.batch import ScoredBatch, bound_negative, build_batch, score
from agentloop.learning.gradients import Losses, accumulate_gradients, check_behavior, corrected, stream_losses
from agentloop.learning.optimizer import sum_gradients_in_float32
from agentloop.learning.update_stats import Drift, EssWeights, UpdateTotals, drift_of, quantiles
from agentloop.models.actor import Actor
from agentloop.models.adapters import reference_policy
from agentloop.runs.run_folder import RunFolder
from agentloop.user_code import load_sampler
from replay.records import FRESH, REPLAY, BatchRow
from replay.store import ReplayStore

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and of how much."""


@dataclass(frozen=True, eq=False)
class Ready:
    """An objective with the batch as it is given it."""

    loss: WhatIfLoss
    losses: Losses
    scored: ScoredBatch
    """After its correction."""


def what_if(
    store: ReplayStore,
    folder: RunFolder,
    policy: tuple[int, Path | str],
    *,
    losses: Sequence[WhatIfLoss],
    asked: RowChoice,
    progress: Progress = lambda *_: None,
) -> WhatIf:
    """One optimizer step of every objective on the rows, alone in each staleness bucket and over all of them.

    `policy` is a version of the run's policy and where its weights are. The gradient is the trainer's own
    (`accumulate_gradients`) and no step is made: weights, database and random states stay as they are. Current and old
    log-probs are those of `policy`, scored once for all objectives.
    Raises UserError where nothing is left to look at, and for rows that an objective can't be trained on.
    """
    config, (version, weights) = folder.config, policy
    rows, available, left_out = choose_rows(store, folder, version, asked)
    if not rows:
        left = "".join(f"; {len(ids)} left out, {why}" for why, ids in left_out.items())
        raise UserError(
            f"rows to look at must be at least one, got none of {folder.path}{left}. Change what is asked for; see: "
            "agentloop replay ls"
        )
    torch.set_num_threads(config.run.threads)
    actor = Actor(load_weights(folder, weights).model, packs=config.batch.packs, compute=compute_asked(config))
    progress("score", 0, 1)
    scored = _scored(actor, folder, rows, [loss.config for loss in losses])
    progress("score", 1, 1)
    ready = [made_ready(loss, scored) for loss in losses]
    data, effects = _measured(actor, ready, scored, ess_weights=config.replay.ess.weights, progress=progress)
    return WhatIf(
        run=folder.path.name,
        version=version,
        weights=str(weights),
        rows=asked.in_words(),
        advantages=advantages_in_words(config, asked),
        found=available,
        objectives=tuple(loss.objective for loss in losses),
        data=data,
        effects=effects,
        left_out=left_out,
        notes=tuple(_notes(config, {row.stream for row in rows}, losses, asked)),
    )


def _scored(actor: Actor, folder: RunFolder, rows: Sequence[BatchRow], configs: Sequence[RunConfig]) -> ScoredBatch:
    """The rows with what all objectives share: log-probs of the policy, and of the reference if one needs it."""
    run = folder.config
    batch = build_batch(rows, run.context.author_table()).to(actor.device)
    old, _ = score(actor, batch, max_tokens=run.batch.micro_batch_tokens)
    with_kl = next((config for config in configs if config.kl.loss_coef > 0), None)
    if with_kl is None:
        return ScoredBatch(batch, old, None)
    reference = reference_policy(with_kl, weights_of_run(folder)[0], actor)
    assert reference is not None
    return ScoredBatch(batch, old, score(reference, batch, max_tokens=run.batch.micro_batch_tokens)[0])


def made_ready(loss: WhatIfLoss, scored: ScoredBatch) -> Ready:
    """An objective with its batch. Raises UserError where it can't be trained on these rows."""
    batch = scored.batch
    try:
        check_behavior(batch, loss.config)
        losses = stream_losses(loss.config.loss)
    except UserError as error:
        raise UserError(f"{loss.name}: {error}") from error
    rows = [bound_negative(row, loss.config.replay.negative_weight) for row in batch.members]
    weights = torch.tensor([row.weight for row in rows]).to(batch.loss_weights)
    weighted = replace(scored, batch=replace(batch, loss_weights=weights[batch.trajectory]))
    return Ready(loss, losses, corrected(weighted, loss.config.loss)[0])


def _measured(
    actor: Actor, ready: Sequence[Ready], scored: ScoredBatch, *, ess_weights: EssWeights, progress: Progress
) -> tuple[tuple[PartData, ...], tuple[Effect, ...]]:
    """Bucket by bucket, then all rows together."""
    batch, drift = scored.batch, drift_of(scored)
    action_tokens = sum_by_trajectory(batch.response_mask, batch.trajectory, batch.num_trajectories)
    buckets = buckets_of(batch.members)
    data: list[PartData] = []
    effects: list[Effect] = []
    total = len(ready) * (len(buckets) + 1)
    progress("gradients", 0, total)
    for bucket in [*buckets, ALL]:
        places = [place for place, row in enumerate(batch.members) if bucket in (ALL, bucket_of(row))]
        members = torch.tensor(places, device=batch.trajectory.device)
        data.append(part_data(bucket, drift, members, action_tokens, ess_weights=ess_weights))
        if bucket == ALL and len(buckets) == 1:  # its numbers are there already
            effects += [replace(effect, bucket=ALL) for effect in effects]
            continue
        for one in ready:
            effects.append(effect_of(actor, one, bucket, members))
            progress("gradients", len(effects), total)
    progress("gradients", total, total)
    return tuple(data), tuple(effects)


def part_data(
    bucket: str, drift: Drift, members: Tensor, action_tokens: Tensor, *, ess_weights: EssWeights
) -> PartData:
    """What the trajectories `members` [n] of a batch are, with the action tokens [N] of all its trajectories."""
    tokens, known = action_tokens[members], drift.tokens[members]
    measured = members[known > 0]
    there = len(measured) > 0
    return PartData(
        bucket=bucket,
        trajectories=len(members),
        tokens=int(tokens.sum()),
        unknown=int((tokens - known).sum()),
        drift_mean=float(drift.sum[measured].sum() / known.sum()) if there else None,
        token_gap_max=float(drift.token_gap_max[measured].max()) if there else None,
        ess=drift.effective_sample_size(measured, ess_weights) if there else None,
    )


class _ClipTotals(UpdateTotals):
    """Also counts the clipped tokens whose ratio is above 1."""

    def __init__(self, replayed: Tensor) -> None:
        super().__init__(replayed)
        self.clipped_above = torch.zeros_like(self.clipped)

    def add(self, policy: PolicyLoss, inputs: ObjectiveInput, *, weights: Tensor) -> None:
        super().add(policy, inputs, weights=weights)
        above = policy.clipped & (inputs.log_ratios > 0)
        self.clipped_above += sum_by_trajectory(above, inputs.trajectory, len(self.trained))


def effect_of(actor: Actor, ready: Ready, bucket: str, members: Tensor) -> Effect:
    """One step of an objective on the rows of these trajectories alone. Leaves no gradient behind."""
    batch = ready.scored.batch
    mini = ready.scored.select(torch.isin(batch.trajectory, members).nonzero()[:, 0])
    totals = _ClipTotals(batch.replayed)
    parameters = [p for p in actor.model.parameters() if p.requires_grad]
    sum_gradients_in_float32(parameters)
    try:
        step = accumulate_gradients(actor, mini, ready.loss.config, losses=ready.losses, totals=totals)
        gradient = [p.grad for p in parameters if p.grad is not None]
        gradient_norm = float(nn.utils.get_total_norm(gradient)) if gradient else 0.0
    finally:
        for parameter in parameters:
            parameter.grad = None
    trained, scored = float(totals.trained.sum()), float(totals.scored.sum())
    ratios = torch.cat([totals.ratios_of(replayed=False), totals.ratios_of(replayed=True)])
    low, middle, high = quantiles(ratios).values() if len(ratios) else (None, None, None)

    def share(counted: Tensor) -> float | None:
        return float(counted.sum()) / trained if trained else None

    return Effect(
        objective=ready.loss.name,
        bucket=bucket,
        trained_tokens=int(trained),
        clipped=share(totals.clipped),
        clipped_above=share(totals.clipped_above),
        clipped_below=share(totals.clipped - totals.clipped_above),
        clipped_dual=share(totals.clipped_lower),
        ratio_p01=low,
        ratio_p50=middle,
        ratio_p99=high,
        approx_kl=float(totals.approx_kl.sum()) / scored if scored else None,
        loss=step.loss,
        gradient_norm=gradient_norm,
    )


def _notes(run: RunConfig, streams: set[str], losses: Sequence[WhatIfLoss], asked: RowChoice) -> Iterator[str]:
    for stream in (name for name in (FRESH, REPLAY) if name in streams):
        names = [loss.name for loss in losses if getattr(loss.config.loss, stream).anchor == "old"]
        if names:
            yield (
                f"{', '.join(names)}: anchor old, so before the first step the ratio of {stream} rows is 1 and clips "
                "nothing"
            )
    if run.algorithm == "ppo":
        yield "algorithm ppo: a row's advantage is the mean that its critic gave its tokens, on every one of them"
    if run.critic.backbone == "shared":
        yield "critic.backbone shared: what the critic adds to the policy's gradient is left out"
    if run.advantage.credit == "turn":
        yield "advantage.credit turn: a row's advantage stands on all of its tokens; those of its turns are not stored"
    if REPLAY in streams and asked.iteration is None:
        sampler = load_sampler(run.replay.sampler, 0, run.replay.sampler_options)
        if sampler.corrects:
            yield f"replay.sampler {run.replay.sampler}: importance weights that a draw would give are left out"
