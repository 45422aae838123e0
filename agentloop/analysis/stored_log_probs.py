"""Compares stored log-probs with those of a model: the policies that sampled the tokens, or another policy."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm.std import tqdm  # type: ignore[import-untyped]

from agentloop.analysis.stored_policies import first_weights
from agentloop.learning.batch import Batch, ScoredBatch, build_batch
from agentloop.learning.passes import score
from agentloop.learning.update_stats import Drift, drift_of
from agentloop.models.actor import Actor
from agentloop.models.adapters import load_policy
from agentloop.models.loading import LoadedModel
from agentloop.runs.run_folder import RunFolder
from context.authors import AuthorTable
from replay.questions import sampled_rows
from replay.records import BatchRow, Trajectory
from replay.store import ReplayStore

_BATCH = 32
"""Number of trajectories that are read at once."""


@dataclass(frozen=True)
class PolicyCheck:
    """A comparison of stored behavior log-probs with those by the weights of the policy that sampled them."""

    version: int
    model: str
    trajectories: int
    tokens: int
    worst: float
    """Greatest difference, in nats."""
    mean: float


@dataclass(frozen=True)
class LogProbCheck:
    policies: tuple[PolicyCheck, ...]
    gone: tuple[int, ...]
    """Versions that sampled stored tokens, but whose weights are gone."""

    @property
    def worst(self) -> float:
        return max((policy.worst for policy in self.policies), default=0.0)


@dataclass(frozen=True)
class Drifted:
    """The drift of a policy from the stored rows, over action tokens with a known behavior log-prob."""

    version: int
    trajectories: int
    tokens: int
    drift_mean: float | None
    token_gap_max: float | None
    """Nats."""
    approx_kl: float | None
    ess: float | None
    """Effective sample size, as updates measure it."""


def check_log_probs(
    store: ReplayStore,
    folder: RunFolder,
    weights: Mapping[int, Path | str],
    *,
    filter: str | None = None,
    skip: Collection[str] = (),
) -> LogProbCheck:
    """Recompute the behavior log-probs of the run's own rows, except for `skip`, version by version."""
    rows = [row for row in sampled_rows(store, folder.run_id, filter) if row.id not in skip]
    checks, gone = [], []
    for version in sorted({version for _, oldest, newest in rows for version in range(oldest, newest + 1)}):
        ids = [id for id, oldest, newest in rows if oldest <= version <= newest]
        if version not in weights:
            gone.append(version)
            continue
        check = _check_policy(store, folder, ids, version, weights[version])
        if check.tokens:
            checks.append(check)
    return LogProbCheck(tuple(checks), tuple(gone))


def rescore(
    store: ReplayStore, folder: RunFolder, version: int, weights: Path | str, *, filter: str | None, limit: int | None
) -> Drifted:
    """Score stored trajectories with a policy and store its log-probs next to the old ones (`token_scores`)."""
    actor, ids = _load_actor(folder, weights), [row.id for row in sampled_rows(store, None, filter, limit=limit)]
    parts: list[Drift] = []
    for rows, batch, log_probs in _score_rows(store, folder, actor, ids):
        store.add_scores(folder.run_id, version, _split_by_segment(rows, batch, log_probs))
        found = drift_of(ScoredBatch(batch, log_probs, None))
        parts.append(replace(found, token_logs=found.token_logs.flatten()))
    if not any(bool(part.tokens.any()) for part in parts):
        return Drifted(version, sum(len(part.tokens) for part in parts), 0, None, None, None, None)
    whole = Drift(**{each.name: torch.cat([getattr(part, each.name) for part in parts]) for each in fields(Drift)})
    known, tokens = whole.tokens > 0, int(whole.tokens.sum())
    return Drifted(
        version,
        len(known),
        tokens,
        drift_mean=float(whole.sum[known].sum()) / tokens,
        token_gap_max=float(whole.token_gap_max.max()),
        approx_kl=float(whole.kl_sum[known].sum()) / tokens,
        ess=whole.effective_sample_size(known),
    )


def load_weights(folder: RunFolder, weights: Path | str) -> LoadedModel:
    """Load weights of the run, or of another model of its family."""
    first = first_weights(folder)
    return load_policy(folder.config, first, saved=None if weights == first else Path(weights))


def _load_actor(folder: RunFolder, weights: Path | str) -> Actor:
    return Actor(load_weights(folder, weights).model, compute=folder.config.compute)


def _check_policy(
    store: ReplayStore, folder: RunFolder, ids: Sequence[str], version: int, weights: Path | str
) -> PolicyCheck:
    actor = _load_actor(folder, weights)
    count = tokens = 0
    worst = total = 0.0
    for rows, batch, log_probs in _score_rows(store, folder, actor, ids):
        mine = batch.response_mask & ~batch.behavior_log_probs.isnan() & (_token_versions(rows, batch) == version)
        gaps = (log_probs - batch.behavior_log_probs)[mine].abs().double()
        count += len(set(batch.trajectory[mine.any(dim=1)].tolist()))
        tokens += len(gaps)
        total += float(gaps.sum())
        worst = max(worst, float(gaps.max()) if len(gaps) else 0.0)
    return PolicyCheck(version, str(weights), count, tokens, worst, total / tokens if tokens else 0.0)


def _score_rows(
    store: ReplayStore, folder: RunFolder, actor: Actor, ids: Sequence[str]
) -> Iterator[tuple[list[Trajectory], Batch, Tensor]]:
    """Yield trajectories of one run at a time, with their log-probs [B, T] on the CPU."""
    for start in tqdm(range(0, len(ids), _BATCH), "scoring rows", disable=None, leave=False):  # in a terminal alone
        read = store.read(ids[start : start + _BATCH])
        for run, group in groupby(read, key=lambda row: row.record.run):
            rows = list(group)
            authors = AuthorTable.from_json(store.run(run).authors)
            batch = build_batch([BatchRow(row) for row in rows], authors)
            there = batch.to(actor.device)
            log_probs, _ = score(actor, there, max_tokens=folder.config.batch.micro_batch_tokens)
            yield rows, batch, log_probs.cpu()


def _token_versions(rows: Sequence[Trajectory], batch: Batch) -> Tensor:
    """[B, T] int64: the policy that sampled each token; -1 for none, or if it saw more than is stored."""
    versions = torch.full(batch.token_ids.shape, -1)
    parts = [segment for row in rows for segment in row.segments if len(segment.tokens)]
    for row, segment in zip(versions, parts, strict=True):
        if segment.behavior_context == "plain":
            row[: len(segment.tokens)] = torch.from_numpy(segment.tokens.policy_versions.astype(np.int64))
    return versions


def _split_by_segment(
    rows: Sequence[Trajectory], batch: Batch, log_probs: Tensor
) -> dict[tuple[str, int], npt.NDArray[np.float32]]:
    """Split log-probs by trajectory and segment; NaN where no token was sampled."""
    places = [(row.id, i) for row in rows for i, segment in enumerate(row.segments) if len(segment.tokens)]
    values = torch.where(batch.response_mask, log_probs.float(), torch.nan).numpy()
    return {place: values[i, : batch.lengths[i]] for i, place in enumerate(places)}
