"""Frozen dataclasses, one per table row. Facts only; what is derived is asked of `stats`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from context.messages import Message
from context.tokens import Segment

ELIGIBLE = "eligible"
UNTRAINABLE = "untrainable"
ORPHANED = "orphaned"
QUARANTINED = "quarantined"
EVICTED = "evicted"
"""It is never drawn again, and its content is about to go; then `replay.storage.reclaimed` has what is left."""
STATES = (ELIGIBLE, UNTRAINABLE, ORPHANED, QUARANTINED, EVICTED)


DUPLICATE = "duplicate of "
REDACTED = "redacted"
"""How the reasons of rows begin that were evicted on their way in."""


FORGOTTEN = "forgotten"
"""Reason of rows whose content was removed for good."""
REMOVED_TASK = '{"removed":true}'
"""Payload of a task of which no row is stored any more."""


OWN_SOURCES = ("self", "gateway")
"""Sources of what a run collects itself; any other is the name of an import."""


RESERVED = "reserved"
COMMITTED = "committed"


FRESH = "fresh"
REPLAY = "replay"


ANSWERED = "answered"
"""Stop reason of an episode that ended with an answer."""


@dataclass(frozen=True)
class RunRecord:
    id: str
    name: str
    config: Mapping[str, Any]
    authors: str
    """The author table as JSON."""
    authors_hash: str
    code_version: str
    fingerprint: Mapping[str, Any] | None = None
    """What makes tokens mean the same: `tokenizer` and `template` hash, `model_family`, `vocab_size`; None: unknown."""


@dataclass(frozen=True)
class PolicyRecord:
    run: str
    version: int
    """Publishes before; 0 = the policy the run started with."""
    checkpoint: str | None
    """Path of the snapshot relative to the run folder; None when it was not kept."""
    tokenizer_hash: str
    template_hash: str


@dataclass(frozen=True)
class TaskRecord:
    hash: str
    environment: str
    payload: Mapping[str, Any]


@dataclass(frozen=True)
class GroupRecord:
    """The members of one task in one iteration. Its statistics outlive evicted members."""

    id: str
    run: str
    task: str
    iteration: int
    size: int
    reward_mean: float
    reward_std: float
    """Population standard deviation at birth."""
    success_rate: float


@dataclass(frozen=True)
class TrajectoryRecord:
    id: str
    """Hash of run, iteration, task, member and attempt."""
    run: str
    group: str
    task: str
    iteration: int
    """The iteration that collected it."""
    slot: int
    """Position within the iteration's fresh rows; with `iteration` the order of every selection."""
    member: int
    """Position within the group."""
    attempt: int
    """How often the run had been resumed when it was collected."""
    source: str
    """self | teacher | import | gateway"""
    reward: float
    success: bool
    advantage: float
    """Of the group it was born in."""
    stop_reason: str
    error_kind: str | None
    num_turns: int
    num_tool_calls: int
    num_tokens: int
    num_action_tokens: int
    policy_version_min: int
    policy_version_max: int
    temperature: float
    top_p: float
    top_k: int
    logprobs_mode: str
    """`full`: over the whole vocabulary, at `temperature`."""
    mean_entropy: float | None
    """Nats per action token when sampled; None where the generator does not tell."""
    mean_behavior_log_prob: float
    min_behavior_log_prob: float
    environment: str
    environment_version: str
    content_hash: str = ""
    """Of ids, authors, log-probs and versions; filled by the store."""
    parent: str | None = None
    state: str = ELIGIBLE


@dataclass(frozen=True)
class Trajectory:
    """A record with its training sequences and its messages: visible whole or not at all."""

    record: TrajectoryRecord
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...] = ()

    @property
    def id(self) -> str:
        return self.record.id


@dataclass(frozen=True)
class DrawRecord:
    """One slot of one iteration's batch: which experience fed which update, and how far it had drifted."""

    run: str
    iteration: int
    slot: int
    trajectory: str
    stream: str
    """fresh | replay"""
    probability: float | None
    """Share of the sampler's weight this row, or its group, had at the draw; None: fresh, or taken by rank."""
    staleness: int | None
    """The drawing policy's version minus the row's smallest; None for rows of another run."""
    state: str = RESERVED
    advantage: float | None = None
    drift_mean: float | None = None
    drift_max: float | None = None
    ess_share: float | None = None
    """The row's weight over the sum of its stream's weights."""
    approx_kl: float | None = None
    clip_fraction: float | None = None


@dataclass(frozen=True, eq=False)
class Histogram:
    """Tokens of one stream in one update, by what `quantity` was of them."""

    quantity: Literal["ratio", "drift"]
    """ratio: current over anchor probability, of trained tokens in every gradient pass.
    drift: probability at the beginning of the update over that when sampled, of action tokens."""
    stream: str
    """fresh | replay"""
    age: str
    """The age bucket of replayed rows; empty for fresh ones, which have none."""
    counts: npt.NDArray[np.int64]
    """[BINS] tokens: see `replay.storage.format.ratio_histograms`."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        mine, theirs = ((each.quantity, each.stream, each.age) for each in (self, other))
        return mine == theirs and np.array_equal(self.counts, other.counts)


@dataclass(frozen=True)
class IterationRecord:
    run: str
    iteration: int
    policy_version: int
    """Of the policy that collected it."""
    planned_fresh: int
    planned_replay: int
    fresh: int
    replay: int
    fraction: float
    """Configured for this iteration, after the schedule."""
    optimizer_steps: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    histograms: Sequence[Histogram] = ()
    """One per quantity, stream and age; what had no token to be measured on is absent."""


def age_bucket(staleness: int | None) -> str:
    """Buckets that double: 0, 1, 2-3, 4-7, 8-15, ...; `unknown` for rows of other runs."""
    if staleness is None:
        return "unknown"
    if staleness < 2:
        return str(staleness)
    first = 1 << (staleness.bit_length() - 1)
    return f"{first}-{2 * first - 1}"
