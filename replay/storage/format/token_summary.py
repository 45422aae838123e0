"""The numbers of a trajectory's record that follow from its tokens. They are computed here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from context.authors import AuthorTable
from context.tokens.token_sequence import NOT_SAMPLED, TokenSequence
from replay.records import Trajectory

SUMMARY = (
    *("num_tokens", "num_action_tokens", "policy_version_min", "policy_version_max"),
    *("mean_behavior_log_prob", "min_behavior_log_prob"),
)
"""Fields of `TrajectoryRecord`."""


@dataclass(frozen=True)
class JoinedTokens:
    """The tokens of several trajectories, one after another: looked at together they take a fraction of the time."""

    sequence: TokenSequence
    action: npt.NDArray[np.bool_]
    sampled: npt.NDArray[np.bool_]
    """True = by a policy of the run; other action tokens were written in its place."""
    behavior: npt.NDArray[np.bool_]
    """True = comes with the log-prob it was sampled with."""
    log_probs: npt.NDArray[np.float32]
    """The log-probs of these tokens, at most 0; NaN for others."""
    starts: list[int]
    """Where each trajectory begins; it has at least one token."""


def joined(trajectories: Sequence[Trajectory], authors: AuthorTable) -> JoinedTokens:
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    tokens = TokenSequence.concatenate(segment.tokens for segment in segments)
    # In sight of a hint, tokens were sampled in another context than the stored one.
    plain = np.repeat([s.behavior_context == "plain" for s in segments], [len(s.tokens) for s in segments])
    sampled = authors.has_behavior(tokens.authors)
    behavior = sampled & plain
    log_probs = np.where(behavior, np.minimum(tokens.behavior_log_probs, np.float32(0.0)), np.float32(np.nan))
    lengths = [sum(len(segment.tokens) for segment in trajectory.segments) for trajectory in trajectories]
    starts = [0, *accumulate(lengths[:-1])]
    return JoinedTokens(tokens, authors.is_action(tokens.authors), sampled, behavior, log_probs, starts)


def summaries(tokens: JoinedTokens) -> list[dict[str, Any]]:
    """The fields of `SUMMARY`, by name, of each trajectory; none of a policy version where no token was sampled."""
    starts, versions = tokens.starts, tokens.sequence.policy_versions
    oldest = np.minimum.reduceat(np.where(tokens.sampled, versions, np.iinfo(np.int32).max), starts)
    newest = np.maximum.reduceat(np.where(tokens.sampled, versions, NOT_SAMPLED), starts)
    totals = np.add.reduceat(np.where(tokens.behavior, tokens.log_probs, np.float32(0.0)), starts, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        means = totals / np.add.reduceat(tokens.behavior, starts, dtype=np.int64)
    columns = (
        np.diff([*starts, len(tokens.sequence)]),
        np.add.reduceat(tokens.action, starts, dtype=np.int64),
        oldest,
        newest,
        means,
        np.fmin.reduceat(tokens.log_probs, starts),
    )
    found = [dict(zip(SUMMARY, facts, strict=True)) for facts in zip(*(c.tolist() for c in columns), strict=True)]
    for facts in found:
        if facts["policy_version_max"] == NOT_SAMPLED:
            del facts["policy_version_min"], facts["policy_version_max"]
    return found


def summarised(trajectories: Sequence[Trajectory], authors: AuthorTable) -> list[Trajectory]:
    """The trajectories with the records that the store will give them; each has at least one token."""
    if not trajectories:
        return []
    found = zip(trajectories, summaries(joined(trajectories, authors)), strict=True)
    return [replace(row, record=replace(row.record, **facts)) for row, facts in found]
