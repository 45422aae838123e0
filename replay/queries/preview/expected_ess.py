"""The effective sample size that replayed rows would have in the next update, before it is made.

ESS = (sum w)^2 / (N sum w^2), w = exp(mean over a row's sampled tokens of the clamped log drift), as an update reports
it under `ess_mean` (`agentloop.algorithms.diagnostics`). What w is known from, the surer first:

- The row's own scores by the newest policy (`agentloop replay rescore`): w exactly.
- What was drawn lately. A draw stores its ess_share, w over the sum of its iteration's w: shares of one iteration are
  proportional to w, so they give every weight up to one factor per iteration. The factors are fitted so that rows born
  together weigh the same on average in each of the iterations that drew them; ESS does not ask for the last factor,
  common to all. A row weighs as those drawn rows did that ended as well as it (success or not) and were born when it
  was: the policy has moved away from all of them by the same updates. It is not their age that counts: where learning
  was quick for a while, rows from before and after it weigh differently at the same age.
- Nothing: then w is not known, and the row is counted as such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from context.tokens.token_sequence import Segment
from replay.records import COMMITTED, REPLAY
from replay.storage.format.encoding import BlobError, decode_log_probs
from replay.storage.format.schema import draws, iterations, token_scores
from replay.storage.read import load
from replay.storage.reclaimed import BORN, IS_KNOWN, with_born
from replay.storage.statements import rows_by_key

Floats = npt.NDArray[np.float64]


LOG_RATIO_BOUND = 20.0
"""Nats; log drifts are clamped to it, as in `agentloop.algorithms.log_probs`."""
_LATELY = 8
"""Iterations with replay that are looked back on: fewer know too few rows, more were another policy's."""
_ROUNDS = 20
"""Of fitting the factors."""
_MOST_UNKNOWN = 0.1
"""Share of rows without a known weight above which nothing is expected: the unknown ones may be the worst."""


@dataclass(frozen=True)
class Kind:
    """What a row is looked up by among those that were drawn."""

    born: int
    """Policy version; -1: of another run, whose versions count something else."""
    run: str
    success: bool


@dataclass(frozen=True)
class Past:
    """Rows that were drawn lately, with their weights relative to each other."""

    born: npt.NDArray[np.int64]
    run: npt.NDArray[np.str_]
    success: npt.NDArray[np.bool_]
    weight: Floats

    def weights_like(self, kind: Kind, version: int) -> Floats:
        """[n] weights of drawn rows like it, which policy `version` is about to learn from; empty: there are none."""
        near = same = (self.run == kind.run) & (self.success == kind.success)
        if kind.born >= 0:
            age = version - kind.born
            for apart in (max(1, age // 4), max(2, age // 2)):
                near = same & (np.abs(self.born - kind.born) <= apart)
                if near.any():
                    break
        weights: Floats = self.weight[near]
        return weights


def past_weights(connection: sa.Connection, run: str, *, before: int) -> Past:
    """From the committed replay draws of the newest iterations before `before`."""
    mine = (iterations.c.run == run) & (iterations.c.iteration < before) & (iterations.c.replay > 0)
    lately = sa.select(iterations.c.iteration).where(mine).order_by(iterations.c.iteration.desc()).limit(_LATELY)
    columns = (draws.c.iteration, draws.c.ess_share, draws.c.staleness)
    query = (
        sa.select(*columns, *BORN)
        .select_from(with_born(draws, draws.c.trajectory))
        .where(draws.c.run == run, draws.c.iteration.in_(lately), draws.c.stream == REPLAY)
        .where(draws.c.state == COMMITTED, draws.c.ess_share.is_not(None), IS_KNOWN)
        .order_by(draws.c.iteration, draws.c.slot)
    )
    found = connection.execute(query).all()
    iteration = np.array([row.iteration for row in found], np.int64)
    share = np.array([row.ess_share for row in found], np.float64)
    born = np.array([-1 if row.staleness is None else row.policy_version_min for row in found], np.int64)
    success = np.array([row.success for row in found], np.bool_)
    runs = np.array([row.born_run for row in found], np.str_)
    return Past(born, runs, success, fitted_weights(iteration, share, np.array([born // 2, success])))


def fitted_weights(iteration: npt.NDArray[np.int64], share: Floats, kind: npt.NDArray[np.int64]) -> Floats:
    """[n] weights, of mean 1 or near it, whose shares within each iteration are `share`.

    `kind` [*, n] says which rows are taken to weigh the same on average in every iteration. In turn: the mean of each
    kind over all iterations, and the factor of each iteration that gives its rows these means together.
    """
    if not len(share):
        return share
    _, at = np.unique(iteration, return_inverse=True)
    _, of_kind = np.unique(kind, axis=1, return_inverse=True)
    of_kind = of_kind.reshape(-1)
    rows = np.bincount(at)
    relative = share * rows[at] / np.bincount(at, weights=share)[at]
    factor = np.ones(len(rows))
    for _ in range(_ROUNDS):
        mean = np.bincount(of_kind, weights=relative * factor[at]) / np.bincount(of_kind)
        factor = np.bincount(at, weights=mean[of_kind]) / rows
        factor /= factor.mean()
    weights: Floats = relative * factor[at]
    return weights


def scored_weights(connection: sa.Connection, ids: Sequence[str], *, run: str, version: int) -> dict[str, float]:
    """w of those rows that policy `version` of `run` has scored whole."""
    columns = (token_scores.c.trajectory, token_scores.c.position, token_scores.c.run, token_scores.c.policy_version)
    whole: dict[str, set[int]] = {}
    for id, position, by, of in rows_by_key(connection, columns, ids, key=token_scores.c.trajectory):
        if by == run and of == version:
            whole.setdefault(id, set()).add(position)
    if not whole:
        return {}
    blobs = {
        (id, position): blob
        for id, position, blob in rows_by_key(
            connection,
            (token_scores.c.trajectory, token_scores.c.position, token_scores.c.log_probs),
            list(whole),
            key=token_scores.c.trajectory,
        )
    }
    loaded = load(connection, list(whole), with_messages=False, by_hash=False).whole
    found = {}
    for id, row in loaded.items():
        if whole[id] == set(range(len(row.segments))):
            with suppress(BlobError):  # damaged scores tell as much as none
                weight = row_weight(row.segments, [blobs[id, position] for position in range(len(row.segments))])
                if weight is not None:
                    found[id] = weight
    return found


def row_weight(segments: Sequence[Segment], scores: Sequence[bytes]) -> float | None:
    """exp(mean of the clamped log drift) over tokens with a known behavior log-prob; None: there is none."""
    logs = [
        decode_log_probs(blob, len(segment.tokens)).astype(np.float64) - segment.tokens.behavior_log_probs
        for segment, blob in zip(segments, scores, strict=True)
    ]
    known = np.concatenate([log[~np.isnan(log)] for log in logs]) if logs else np.zeros(0)
    return float(np.exp(np.clip(known, -LOG_RATIO_BOUND, LOG_RATIO_BOUND).mean())) if len(known) else None


@dataclass(frozen=True)
class Expected:
    """ESS of the replayed rows of the next update, over some example draws."""

    value: float | None
    """Mean; None: too little is known."""
    low: float | None
    high: float | None
    """Nine draws of ten lie between."""
    scored: int
    """Rows of all draws together, each as often as it was drawn, that are known by their own scores."""
    estimated: int
    """Taken to weigh as rows like them did."""
    unknown: int


def expected_ess(
    drawn: Sequence[Sequence[str]],
    kinds: Mapping[str, Kind],
    *,
    scored: Mapping[str, float],
    past: Past,
    version: int,
    random: np.random.Generator,
) -> Expected:
    """Of example draws, by the ids of their rows. A row without scores weighs as one, drawn at random, of those like
    it; an example without a known row counts in the numbers of rows alone."""
    ids = sorted({id for ids in drawn for id in ids})
    like = {kind: past.weights_like(kind, version) for kind in {kinds[id] for id in ids}}
    scale = _scale({id: scored[id] for id in ids if id in scored}, kinds, like)
    weighed, counts = [], {"scored": 0, "estimated": 0, "unknown": 0}
    for rows in drawn:
        weights = []
        for id in rows:
            candidates = like[kinds[id]]
            how = "scored" if id in scored else "estimated" if scale is not None and len(candidates) else "unknown"
            counts[how] += 1
            if how == "scored":
                weights.append(scored[id])
            elif how == "estimated":
                weights.append((scale or 1.0) * float(candidates[random.integers(len(candidates))]))
        if weights:
            weighed.append(effective_sample_size(np.array(weights)))
    if not weighed or counts["unknown"] > _MOST_UNKNOWN * sum(counts.values()):
        return Expected(None, None, None, **counts)
    low, high = np.quantile(weighed, [0.05, 0.95]).tolist()
    return Expected(float(np.mean(weighed)), low, high, **counts)


def effective_sample_size(weights: Floats) -> float:
    """(sum w)^2 / (N sum w^2) of [N] positive weights: 1 when all are equal, 1 / N when one has all."""
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def _scale(scored: Mapping[str, float], kinds: Mapping[str, Kind], like: Mapping[Kind, Floats]) -> float | None:
    """What relative weights are multiplied by to stand beside scored ones; None: no scored row has one like it."""
    if not scored:
        return 1.0
    pairs = [(weight, like[kinds[id]].mean()) for id, weight in scored.items() if len(like[kinds[id]])]
    return sum(exact for exact, _ in pairs) / sum(relative for _, relative in pairs) if pairs else None
