"""Records: frozen dataclasses, one for each kind of table row. They hold facts only; `questions` derives the rest. The
annotation of a field is also its rule: the store and `replay.exchange` check records by it."""

from __future__ import annotations

import math
import re
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
"""The row is never drawn again, and its content will be deleted; `replay.storage.tombstones` keeps a few facts."""
OPEN_GROUP = "open"
"""A worker collected the row, and its group still lacks members. No draw takes it yet."""
WAITING = "waiting"
"""The row's group is whole, and an update will use the row as a fresh one. No draw for replay takes it before that."""
STATES = (ELIGIBLE, UNTRAINABLE, ORPHANED, QUARANTINED, EVICTED, OPEN_GROUP, WAITING)

REDACTED = "redacted"
"""The state reason of a row that was stored without its tokens because its messages were changed."""

FORGOTTEN = "forgotten"
"""The state reason of a row whose content was removed for good."""
REMOVED_TASK = '{"removed":true}'
"""The payload of a task whose last row is gone."""

HINDSIGHT = "hindsight"
"""Source of a row that holds the task which a failed episode, its `parent`, did solve."""
OWN_SOURCES = ("self", "gateway", HINDSIGHT)
"""Sources of rows that a run collects itself; any other source is the name of an import."""

RESERVED = "reserved"
COMMITTED = "committed"

FRESH = "fresh"
REPLAY = "replay"


class StopReason(StrEnum):
    """Why an episode ended. A context strategy has reasons of its own, and an import may bring any other."""

    ANSWERED = "answered"  # the policy answered
    ENDED = "ended"  # the environment said that the episode is over
    TRUNCATED = "truncated"  # a reply reached its limit on tokens
    OVERTIME = "overtime"
    MAX_TURNS = "max_turns"
    ENGINE_FAILURE = "engine_failure"  # no usable reply: the episode says nothing about the policy
    NOT_JUDGED = "not_judged"  # the environment, its user or its judge failed: the same
    AGENT_FAILED = "agent_failed"  # the agent is a program, whose exit code or function reported a failure
    UNREWARDED = "unrewarded"  # nobody gave the recorded session a reward
    CALLED_LAST = "tool_calls"  # the last reply of an imported conversation calls a tool


WHOLE_ENDS = (StopReason.ANSWERED, StopReason.ENDED)
"""The ends that no limit and no failure caused: the environment always rewards them."""

SOURCE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""Names that a set of rows may have, in `--name`, `replay.attach` and `TrajectoryRecord.source`."""


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


# Pydantic's own length limit refuses lone surrogates, which ids may hold.
Id = Annotated[str, AfterValidator(_not_empty)]
Source = Annotated[str, Field(pattern=f"^{SOURCE_NAME.pattern}$")]
Count = Annotated[int, Field(ge=0, lt=2**31)]
"""A count that every database and every index can hold."""
Finite = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_single)]
"""A number that is finite as a float32 too: tensors hold float32."""
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
    """The facts that make tokens comparable: `tokenizer` and `template` hash, `model_family`, `vocab_size`; None:
    unknown."""

    @property
    def vocab_size(self) -> int | None:
        return stored_setting(self.fingerprint or {}, "vocab_size", int)


@dataclass(frozen=True)
class PolicyRecord:
    run: str
    version: Count
    """The number of publishes before this policy; 0: the policy that the run started with."""
    checkpoint: str | None
    """Path of the snapshot relative to the run folder; None: no snapshot is kept."""
    tokenizer_hash: str
    template_hash: str
    sha256: str | None = None
    """Hash of the files that remote engines load; None: there are none."""
    probe: str | None = None
    """JSON of prompts, with the log-probs of their next tokens by an engine with these weights."""


@dataclass(frozen=True)
class TaskRecord:
    hash: str
    environment: str
    payload: Mapping[str, Any]
    tools: str | None = None
    """JSON of the tools' schemas, where they are the task's own. None: the task has all tools of its environment."""


@dataclass(frozen=True)
class HeldOutEpisode:
    """An episode of an evaluation, stored for people. No draw takes it, and no count of trajectories includes it."""

    run: Id
    iteration: Count
    """The last iteration before the evaluation; 0: before training."""
    number: Count
    """The episode's place in the evaluation."""
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
    """The answer of a deterministic tool. The same call of the same task is answered by it again."""

    id: Id
    """Hash of environment, task and call, and of the earlier calls if they matter."""
    task: str
    environment: str
    """Hash of everything else that decides the answer: name, version, source, options, longest answer."""
    parent: str | None
    """The call before this one; None: it is the first one, or earlier calls do not matter."""
    tool: str
    arguments: Mapping[str, Any]
    content: str
    """The text shown to the policy."""


@dataclass(frozen=True)
class GroupRecord:
    """A group: the members of one task in one iteration. Its statistics outlive evicted members."""

    id: Id
    run: str
    task: str
    iteration: Count
    size: Annotated[int, Field(ge=1, lt=2**31)]
    reward_mean: Finite
    reward_std: Annotated[Finite, Field(ge=0)]
    """Population standard deviation of the rewards when the group was collected."""
    success_rate: Annotated[Finite, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class TrajectoryRecord:
    """The facts about a trajectory without its content. The store fills in the facts that follow from its tokens."""

    id: Id
    """Hash of run, iteration, task, member and attempt, or of an import's content."""
    run: str
    group: str
    task: str
    iteration: Count
    slot: Count
    """Position among the iteration's fresh rows. Every selection orders rows by iteration and slot."""
    member: Count
    """Position within the group."""
    attempt: Count = 0
    """The number of times that the run had been resumed when the row was collected."""
    source: Source = "self"
    """self | gateway | hindsight, or the name of an import"""
    reward: Finite
    success: bool
    advantage: Finite
    """Advantage within the group that the row was collected in."""
    stop_reason: str
    error_kinds: Words | None = None
    """One word for each failed tool call, in order; None: no call failed, or it is unknown."""
    num_turns: Count
    """Replies of the whole conversation."""
    num_tool_calls: Count
    num_user_turns: Count = 0
    """Messages of a user after the first reply."""
    num_tokens: Count = 0
    num_action_tokens: Count = 0
    longest_segment: Count = 0
    """Number of tokens of the longest training sequence."""
    policy_version_min: Count = 0
    policy_version_max: Count = 0
    """Oldest and newest version that sampled a token; as given if no token was sampled."""
    temperature: Annotated[Finite, Field(ge=0)]
    top_p: Annotated[Finite, Field(ge=0, le=1)]
    top_k: Count
    logprobs_mode: str
    """`full`: over the whole vocabulary, at `temperature`."""
    mean_entropy: Finite | None = None
    """Nats per action token at sampling; None: the engine does not report it."""
    mean_behavior_log_prob: float = math.nan
    min_behavior_log_prob: float = math.nan
    """Nats; NaN: no token has a known behavior log-prob."""
    environment: str
    environment_version: str
    content_hash: str = ""
    """Hash of ids, authors, log-probs and versions; the store fills it in."""
    parent: str | None = None
    """The trajectory that this one was made from; None: all of it was sampled."""
    agent_rewards: AgentRewards | None = None
    """JSON for the agents of the session that have rewards of their own; None: all have the trajectory's."""
    state: str = ELIGIBLE

    @property
    def rewards_by_agent(self) -> dict[str, tuple[float, float]]:
        """Reward and advantage of each agent that has its own."""
        return {} if self.agent_rewards is None else _AGENTS.validate_json(self.agent_rewards)


@dataclass(frozen=True)
class Trajectory:
    """A trajectory: a record, its training sequences and its messages. It is stored whole or not at all."""

    record: TrajectoryRecord
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...] = ()
    nodes: tuple[Node, ...] = ()
    """The requests of an agent's session. `segments` follow from them, and `messages` are theirs, in order."""

    @property
    def id(self) -> str:
        return self.record.id


def stored_setting(config: Mapping[str, Any], dotted: str, kind: type[T]) -> T | None:
    """The value of a dotted key such as `replay.fraction`; None if it is missing or not a `kind`. A whole number counts
    as a float."""
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
    """The statistics of a group's record, from the reward and success of each member."""
    rewards = [reward for reward, _ in outcomes]
    rate = fmean(success for _, success in outcomes)
    return {"size": len(rewards), "reward_mean": fmean(rewards), "reward_std": pstdev(rewards), "success_rate": rate}


@dataclass(frozen=True)
class DrawRecord:
    """One slot of one iteration's batch: which row an update used, and how far the policy had drifted from it."""

    run: str
    iteration: Count
    slot: Count
    trajectory: str
    stream: str
    """fresh | replay"""
    probability: Finite | None
    """The share of the sampler's total weight that the row, or its group, had; None: fresh, or drawn by rank."""
    staleness: Count | None
    """The trained policy's version minus the row's smallest; None for rows of another run."""
    state: str = RESERVED
    advantage: Finite | None = None
    drift_mean: Finite | None = None
    token_gap_max: Finite | None = None
    """The largest |old_log_prob - behavior_log_prob| of the row's action tokens, in nats."""
    ess_share: Finite | None = None
    """The row's weight, exp(mean of its log drift), divided by the sum of its stream's. ESS weighs tokens instead."""
    approx_kl: Finite | None = None
    clip_fraction: Finite | None = None
    weight: Finite = 1.0
    """The sampler's factor on the row's loss, at most 1."""


@dataclass(frozen=True)
class BatchRow:
    """A trajectory as a row of one batch: how it was drawn, and the numbers that it is trained with."""

    trajectory: Trajectory
    """A replayed trajectory comes without its messages, which training does not read."""
    draw: DrawRecord | None = None
    """The row's slot in the iteration's batch; None: a fresh row without a slot."""
    advantage: float = 0.0
    """Advantage of the whole trajectory, in reward units."""
    reward: float = math.nan
    """Reward minus the KL penalty of the whole trajectory, in reward units."""
    weight: float = 1.0
    """Factor on the row's loss: the sampler's correction for its preferences, at most 1."""
    token_advantages: tuple[npt.NDArray[np.float32], ...] | None = None
    """One array per segment, one number per token; None: `advantage` on every trained token."""
    scored: bool = False
    """The current weights sampled the row from exactly these tokens, so its behavior log-probs are its old ones."""

    @classmethod
    def drawn(cls, trajectory: Trajectory, draw: DrawRecord) -> BatchRow:
        """The row of a draw, with the reward and advantage that the trajectory was collected with."""
        record = trajectory.record
        return cls(trajectory, draw, advantage=record.advantage, reward=record.reward, weight=draw.weight)

    @property
    def stream(self) -> str:
        return FRESH if self.draw is None else self.draw.stream


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
    """The configured fraction after the schedule."""
    optimizer_steps: Count
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Label:
    """A person's label on a trajectory or a run. It never changes what is trained."""

    label: LabelName
    note: Annotated[str, Field(max_length=10_000)] | None
    made_by: UserName
    created_at: str
