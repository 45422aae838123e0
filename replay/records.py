"""Frozen dataclasses, one per table row: facts only, what is derived is asked of `questions`. A field's annotation is
also its rule, by which the store and the files of `replay.exchange` check records."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, pstdev
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field, TypeAdapter

from context.messages import Message
from context.tokens.session_nodes import Node
from context.tokens.token_sequence import Segment

T = TypeVar("T")

ELIGIBLE = "eligible"
UNTRAINABLE = "untrainable"
ORPHANED = "orphaned"
QUARANTINED = "quarantined"
EVICTED = "evicted"
"""It is never drawn again, and its content is about to go; then `replay.storage.tombstones` has what is left."""
OPEN_GROUP = "open"
"""A worker collected it, and its group still lacks members: no draw takes it yet."""
WAITING = "waiting"
"""Its group is whole, and it is to be fresh once: no draw for replay takes it before."""
STATES = (ELIGIBLE, UNTRAINABLE, ORPHANED, QUARANTINED, EVICTED, OPEN_GROUP, WAITING)

REDACTED = "redacted"
"""Reason of rows that were stored without their tokens, for their messages were changed."""

FORGOTTEN = "forgotten"
"""Reason of rows whose content was removed for good."""
REMOVED_TASK = '{"removed":true}'
"""Payload of a task of which no row is stored any more."""

HINDSIGHT = "hindsight"
"""Source of rows that say what a failed episode, their `parent`, did solve."""
RESTART = "restart"
"""Source of episodes that began inside a stored success, their `parent`."""
OWN_SOURCES = ("self", "gateway", HINDSIGHT, RESTART)
"""Sources of what a run collects itself; any other is the name of an import."""
NOT_FROM_THE_START = (HINDSIGHT, RESTART)
"""Sources of rows that do not say how often their task succeeds when it is asked."""

RESERVED = "reserved"
COMMITTED = "committed"

FRESH = "fresh"
REPLAY = "replay"


class StopReason(StrEnum):
    """What ended an episode. A context strategy has reasons of its own, and an import may bring any other."""

    ANSWERED = "answered"  # by the policy: the only end that the environment scores
    TRUNCATED = "truncated"  # a reply reached its limit on tokens
    OVERTIME = "overtime"
    MAX_TURNS = "max_turns"
    ENGINE_FAILURE = "engine_failure"  # no usable reply: the episode says nothing about the policy
    AGENT_FAILED = "agent_failed"  # a program of its own, whose exit code or function said so
    UNREWARDED = "unrewarded"  # of a recorded session, whose reward nobody has said
    CALLED_LAST = "tool_calls"  # by the last reply of an imported conversation


SOURCE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""What a set of rows may be called, in `--name`, `replay.attach` and `TrajectoryRecord.source`."""


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("should be a text of at least one character")
    return text


def _words(text: str) -> str:
    if not re.fullmatch(r"[\w.:-]+( [\w.:-]+)*", text):
        raise ValueError("should be words of letters, digits, _ . : - with one space between each two")
    return text


LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def _single(number: float) -> float:
    if abs(number) > LARGEST_FLOAT32:
        raise ValueError("should be a number that float32 can hold")
    return number


# Pydantic's own limit of length refuses lone surrogates, which ids may hold.
Id = Annotated[str, AfterValidator(_not_empty)]
Source = Annotated[str, Field(pattern=f"^{SOURCE_NAME.pattern}$")]
Count = Annotated[int, Field(ge=0, lt=2**31)]
"""What counts something: no database and no index has to hold more."""
Finite = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_single)]
"""Also as float32, which tensors hold."""
Words = Annotated[str, AfterValidator(_words)]
LabelName = Annotated[str, Field(max_length=64), AfterValidator(_words)]
UserName = Annotated[str, Field(max_length=200)]
_AGENTS = TypeAdapter(dict[str, tuple[Finite, Finite]])


def _agents(text: str) -> str:
    _AGENTS.validate_json(text)
    return text


AgentRewards = Annotated[str, AfterValidator(_agents)]
"""`{agent: [reward, advantage]}` as JSON."""


@dataclass(frozen=True)
class RunRecord:
    id: Id
    name: str
    config: Mapping[str, Any]
    authors: str
    """The author table as JSON."""
    authors_hash: str
    code_version: str
    fingerprint: Mapping[str, Any] | None = None
    """What makes tokens mean the same: `tokenizer` and `template` hash, `model_family`, `vocab_size`; None: unknown."""

    @property
    def vocab_size(self) -> int | None:
        return stored_setting(self.fingerprint or {}, "vocab_size", int)


@dataclass(frozen=True)
class PolicyRecord:
    run: str
    version: Count
    """Publishes before; 0 = the policy the run started with."""
    checkpoint: str | None
    """Path of the snapshot relative to the run folder; None when it was not kept."""
    tokenizer_hash: str
    template_hash: str
    sha256: str | None = None
    """Of the files that engines elsewhere were given; None where none were."""
    probe: str | None = None
    """JSON: prompts, and the log-probs of next tokens that an engine with these weights gives them."""


@dataclass(frozen=True)
class TaskRecord:
    hash: str
    environment: str
    payload: Mapping[str, Any]


@dataclass(frozen=True)
class HeldOutEpisode:
    """An episode of an evaluation, to be looked at: no draw knows of it, and no count of trajectories."""

    run: Id
    iteration: Count
    """The last one before the evaluation; 0: before training."""
    number: Count
    """Its place in the evaluation."""
    task: Id
    environment: str
    environment_version: str
    reward: Finite
    success: bool
    stop_reason: str
    error_kinds: Words | None
    num_turns: Count
    num_tool_calls: Count
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class ObservationRecord:
    """What a deterministic tool answered: it answers the same whenever a task comes to the same call again."""

    id: Id
    """Hash of environment, task and call, and of the calls before it where those matter."""
    task: str
    environment: str
    """Hash of what decides about its answers besides: name, version, source, options, longest answer."""
    parent: str | None
    """The call before it; None: it is the first one, or what was called before does not matter."""
    tool: str
    arguments: Mapping[str, Any]
    content: str
    """Shown to the policy."""


@dataclass(frozen=True)
class GroupRecord:
    """The members of one task in one iteration. Its statistics outlive evicted members."""

    id: Id
    run: str
    task: str
    iteration: Count
    size: Annotated[int, Field(ge=1, lt=2**31)]
    reward_mean: Finite
    reward_std: Annotated[Finite, Field(ge=0)]
    """Population standard deviation when it was collected."""
    success_rate: Annotated[Finite, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class TrajectoryRecord:
    """What is known of a trajectory besides its content. What follows from its tokens is filled in by the store."""

    id: Id
    """Hash of run, iteration, task, member and attempt."""
    run: str
    group: str
    task: str
    iteration: Count
    slot: Count
    """Position within the iteration's fresh rows; with `iteration` the order of every selection."""
    member: Count
    """Position within the group."""
    attempt: Count = 0
    """How often the run had been resumed when it was collected."""
    source: Source = "self"
    """self | gateway | hindsight | restart, or the name of an import"""
    reward: Finite
    success: bool
    advantage: Finite
    """In the group it was collected with."""
    stop_reason: str
    error_kinds: Words | None = None
    """One word for each tool call that failed, in their order; None: no call failed, or nobody knows."""
    num_turns: Count
    """Replies of the whole conversation, as `num_tool_calls`: those that were kept of its parent's count, too."""
    num_tool_calls: Count
    num_tokens: Count = 0
    num_action_tokens: Count = 0
    longest_segment: Count = 0
    """Tokens of its longest training sequence."""
    policy_version_min: Count = 0
    policy_version_max: Count = 0
    """The newest of the sampled tokens; both as given where there are none."""
    temperature: Annotated[Finite, Field(ge=0)]
    top_p: Annotated[Finite, Field(ge=0, le=1)]
    top_k: Count
    logprobs_mode: str
    """`full`: over the whole vocabulary, at `temperature`."""
    mean_entropy: Finite | None = None
    """Nats per action token when sampled; None where the generator does not tell."""
    mean_behavior_log_prob: float = math.nan
    min_behavior_log_prob: float = math.nan
    """Nats; NaN: no token comes with the log-prob it was sampled with."""
    environment: str
    environment_version: str
    content_hash: str = ""
    """The hash of ids, authors, log-probs and versions; filled by the store."""
    parent: str | None = None
    """The trajectory it was made from; None: it was sampled as it stands."""
    kept_turns: Count | None = None
    """How many of its parent's replies it begins with, which are not trained again; None: it did not begin so."""
    agent_rewards: AgentRewards | None = None
    """Of the agents of its session that have rewards of their own; None: all have the trajectory's."""
    state: str = ELIGIBLE

    @property
    def of_agents(self) -> dict[str, tuple[float, float]]:
        """Reward and advantage of each agent that has its own."""
        return {} if self.agent_rewards is None else _AGENTS.validate_json(self.agent_rewards)


@dataclass(frozen=True)
class Trajectory:
    """A record with its training sequences and its messages: visible whole or not at all."""

    record: TrajectoryRecord
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...] = ()
    nodes: tuple[Node, ...] = ()
    """The requests of an agent's session, from which `segments` follow, and whose messages `messages` are in turn."""

    @property
    def id(self) -> str:
        return self.record.id


def stored_setting(config: Mapping[str, Any], dotted: str, kind: type[T]) -> T | None:
    """The value of `replay.fraction`, say; None where there is none, or none of that kind. Whole numbers are floats."""
    value: Any = config
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    return value if fits else None


def group_of(members: Sequence[Trajectory]) -> GroupRecord:
    first = members[0].record
    statistics = group_statistics([(member.record.reward, member.record.success) for member in members])
    return GroupRecord(first.group, first.run, first.task, first.iteration, **statistics)


def group_statistics(outcomes: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """What a group's record says of its members, from the reward and success of each."""
    rewards = [reward for reward, _ in outcomes]
    rate = fmean(success for _, success in outcomes)
    return {"size": len(rewards), "reward_mean": fmean(rewards), "reward_std": pstdev(rewards), "success_rate": rate}


@dataclass(frozen=True)
class DrawRecord:
    """One slot of one iteration's batch: which experience fed which update, and how far it had drifted."""

    run: str
    iteration: Count
    slot: Count
    trajectory: str
    stream: str
    """fresh | replay"""
    probability: Finite | None
    """Share of the sampler's weight this row, or its group, had at the draw; None: fresh, or taken by rank."""
    staleness: Count | None
    """The drawing policy's version minus the row's smallest; None for rows of another run."""
    state: str = RESERVED
    advantage: Finite | None = None
    drift_mean: Finite | None = None
    token_gap_max: Finite | None = None
    """Nats: the largest |old_log_prob - behavior_log_prob| of its action tokens."""
    ess_share: Finite | None = None
    """The row's weight over the sum of its stream's weights."""
    approx_kl: Finite | None = None
    clip_fraction: Finite | None = None
    weight: Finite = 1.0
    """What the sampler multiplies the row's loss by, at most 1."""


@dataclass(frozen=True)
class BatchRow:
    """A trajectory in its role within one batch: as what it was drawn, and what it is trained with."""

    trajectory: Trajectory
    """A replayed one comes without its messages, which training does not read."""
    draw: DrawRecord | None = None
    """Its slot in the iteration's batch; None: a fresh row that is in none."""
    advantage: float = 0.0
    """The whole trajectory's; reward units."""
    reward: float = math.nan
    """Less the KL penalty of a whole trajectory; reward units."""
    weight: float = 1.0
    """What its loss is multiplied by: the sampler's correction for what it prefers, at most 1."""
    token_advantages: tuple[npt.NDArray[np.float32], ...] | None = None
    """One array per segment, one number per token; None: `advantage` on every trained token."""
    scored: bool = False
    """Sampled by the weights as they are, in sight of just these tokens: its behavior log-probs are its old ones."""

    @classmethod
    def drawn(cls, trajectory: Trajectory, draw: DrawRecord) -> BatchRow:
        """With the numbers that the trajectory was collected with."""
        record = trajectory.record
        return cls(trajectory, draw, advantage=record.advantage, reward=record.reward, weight=draw.weight)

    @property
    def stream(self) -> str:
        return FRESH if self.draw is None else self.draw.stream

    @property
    def staleness(self) -> int | None:
        return None if self.draw is None else self.draw.staleness


@dataclass(frozen=True)
class IterationRecord:
    run: str
    iteration: Count
    policy_version: Count
    planned_fresh: Count
    planned_replay: Count
    fresh: Count
    replay: Count
    fraction: Finite
    """Configured for this iteration, after the schedule."""
    optimizer_steps: Count
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Label:
    """What somebody says of a trajectory or a run; it never changes what is trained on."""

    label: LabelName
    note: Annotated[str, Field(max_length=10_000)] | None
    made_by: UserName
    created_at: str


@dataclass(frozen=True)
class SavedView:
    """A list of trajectories that somebody named: its conditions and its order."""

    name: LabelName
    query: Annotated[str, Field(max_length=10_000)]
    """Of the list's address."""
    made_by: UserName
    created_at: str


ESS_BY_AGE = "actor/replay/ess/age_"
"""Begins the names of the ESS metrics of the replay stream's age buckets."""


def age_bucket(staleness: int | None) -> str:
    """Buckets that double: 0, 1, 2-3, 4-7, 8-15, ...; `unknown` for rows of other runs."""
    if staleness is None:
        return "unknown"
    if staleness < 2:
        return str(staleness)
    first = 1 << (staleness.bit_length() - 1)
    return f"{first}-{2 * first - 1}"


def age_order(bucket: str) -> int:
    """4 for `4-7`: sorts buckets, with unknown ages last."""
    first = bucket.partition("-")[0]
    return int(first) if first.isdecimal() else sys.maxsize
