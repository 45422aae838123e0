"""What each of several objectives would have done with stored trajectories: one optimizer step, computed, not made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from agentloop.algorithms.diagnostics import EssWeights, sum_by_trajectory
from agentloop.analysis.stored_log_probs import compute_asked, load_weights, weights_of_run
from agentloop.analysis.whatif.compared_rows import (
    Row,
    RowChoice,
    advantages_in_words,
    buckets_of,
    choose_rows,
    rows_in_words,
)
from agentloop.analysis.whatif.losses import WhatIfLoss
from agentloop.analysis.whatif.result import ALL, Effect, PartData, WhatIf
from agentloop.analysis.whatif.step import Ready, effects_of, part_data
from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.learning.batch import bound_negative, build_batch
from agentloop.learning.scoring import ScoredBatch, score
from agentloop.learning.stream_losses import check_behavior, corrected, stream_losses
from agentloop.models.actor import Actor
from agentloop.models.reference import reference_policy
from agentloop.runs.run_folder import RunFolder
from agentloop.user_code import load_sampler
from replay.records import FRESH, REPLAY
from replay.sampling.samplers import Sampler
from replay.store import ReplayStore

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and of how much."""


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
    version, weights = policy
    taken = choose_rows(store, folder, version, asked)
    rows = taken.rows
    if not rows:
        left = "".join(f"; {part.count} left out, {part.why}" for part in taken.reasons())
        raise UserError(
            f"rows to look at must be at least one, got none of {folder.path}{left}. Change what is asked for; see: "
            "agentloop replay ls"
        )
    config = folder.config
    torch.set_num_threads(config.run.threads)
    actor = Actor(
        load_weights(folder, weights).model, packs=config.batch.layout == "packed", compute=compute_asked(config)
    )
    progress("score", 0, 1)
    scored = _scored(actor, folder, rows, [loss.config for loss in losses])
    progress("score", 1, 1)
    ready, unfit = all_ready(losses, scored, rows)
    losses = [one.loss for one in ready]
    data, effects = _measured(actor, ready, scored, rows, ess_weights=config.replay.ess.weights, progress=progress)
    return WhatIf(
        run=folder.path.name,
        version=version,
        weights=str(weights),
        rows=rows_in_words(asked),
        advantages=advantages_in_words(config, asked),
        found=taken.found,
        objectives=tuple(loss.objective for loss in losses),
        data=data,
        effects=effects,
        left_out=taken.reasons(),
        notes=(*_notes(config, rows, losses), *unfit),
    )


def _scored(actor: Actor, folder: RunFolder, rows: Sequence[Row], configs: Sequence[RunConfig]) -> ScoredBatch:
    """The rows with what all objectives share: log-probs of the policy, and of the reference if one needs it."""
    run = folder.config
    batch = build_batch([row.item for row in rows], run.context.author_table()).to(actor.device)
    old, _ = score(actor, batch, max_tokens=run.batch.micro_batch_tokens)
    with_kl = next((config for config in configs if config.kl.loss_coef > 0), None)
    if with_kl is None:
        return ScoredBatch(batch, old, None)
    reference = reference_policy(with_kl, weights_of_run(folder)[0], actor)
    assert reference is not None
    return ScoredBatch(batch, old, score(reference, batch, max_tokens=run.batch.micro_batch_tokens)[0])


def all_ready(losses: Sequence[WhatIfLoss], scored: ScoredBatch, rows: Sequence[Row]) -> tuple[list[Ready], list[str]]:
    """The objectives with their batches, and why some that nobody asked for can't be trained on these rows."""
    ready, unfit = [], []
    for loss in losses:
        try:
            ready.append(_ready(loss, scored, rows))
        except UserError as error:
            if loss.asked:
                raise
            unfit.append(f"left out: {error}")
    return ready, unfit


def _ready(loss: WhatIfLoss, scored: ScoredBatch, rows: Sequence[Row]) -> Ready:
    items = [bound_negative(row.item, loss.config.replay.negative_weight) for row in rows]
    try:
        check_behavior(scored.batch, loss.config)
        losses = stream_losses(loss.config.loss)
    except UserError as error:
        raise UserError(f"{loss.name}: {error}") from error
    weights = torch.tensor([item.weight for item in items]).to(scored.batch.loss_weights)
    batch = replace(scored.batch, loss_weights=weights[scored.batch.trajectory])
    return Ready(loss, losses, corrected(replace(scored, batch=batch), loss.config.loss)[0])


def _measured(
    actor: Actor,
    ready: Sequence[Ready],
    scored: ScoredBatch,
    rows: Sequence[Row],
    *,
    ess_weights: EssWeights,
    progress: Progress,
) -> tuple[tuple[PartData, ...], tuple[Effect, ...]]:
    """Bucket by bucket, then all rows together."""
    batch, drift = scored.batch, scored.drift()
    action_tokens = sum_by_trajectory(batch.response_mask, batch.trajectory, len(rows))
    buckets = buckets_of(rows)
    data: list[PartData] = []
    effects: list[Effect] = []
    total = len(ready) * (len(buckets) + 1)

    def so_far(before: int) -> Callable[[int], None]:
        return lambda done: progress("gradients", before + done, total)

    progress("gradients", 0, total)
    for bucket in [*buckets, ALL]:
        chosen = [place for place, row in enumerate(rows) if bucket in (ALL, row.bucket)]
        members = torch.tensor(chosen, device=batch.trajectory.device)
        data.append(part_data(bucket, drift, members, action_tokens, ess_weights=ess_weights))
        if bucket == ALL and len(buckets) == 1:
            effects += [replace(effect, bucket=ALL) for effect in effects]
        else:
            effects += effects_of(actor, ready, bucket, members, progress=so_far(len(effects)))
    progress("gradients", total, total)
    return tuple(data), tuple(effects)


def _notes(run: RunConfig, rows: Sequence[Row], losses: Sequence[WhatIfLoss]) -> Iterator[str]:
    streams = {row.item.stream for row in rows}
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
    if (
        REPLAY in streams
        and type(load_sampler(run.replay.sampler, 0, run.replay.sampler_options)).correction is not Sampler.correction
    ):
        yield f"replay.sampler {run.replay.sampler}: its importance weights of a draw are not stored, and taken as 1"
