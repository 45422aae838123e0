"""Episodes become records: one group a task, one trajectory an episode, with ids that a repeated run finds again."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agentloop.config import RunConfig
from agentloop.rollouts.actors import Actors
from agentloop.rollouts.episode import Episode
from context import NOT_SAMPLED, TokenSequence, response_mask
from replay.records import GroupRecord, Trajectory, TrajectoryRecord

if TYPE_CHECKING:
    from agentloop.rollouts.collect import Collected


@dataclass(frozen=True)
class Birth:
    """Where and when a batch of trajectories is born."""

    run: str
    iteration: int
    attempt: int
    """Makes ids differ from those a killed run had given."""


@dataclass(frozen=True)
class _Place:
    group: str
    task: str
    slot: int
    member: int


class _Places:
    """Numbers that no row of the iteration has yet, whatever rounds came before."""

    def __init__(self, birth: Birth, before: Sequence[Collected]) -> None:
        earlier = [row for round in before for row in round.trajectories]
        self._birth = birth
        self._groups = sum(len(round.groups) for round in before)
        self._slot = len(earlier)
        self._members = Counter(row.record.task for row in earlier)

    def next_group(self) -> str:
        self._groups += 1
        return _identify(self._birth, "group", self._groups - 1)

    def next_member(self, group: str, task: str) -> _Place:
        place = _Place(group, task, self._slot, self._members[task])
        self._slot += 1
        self._members[task] += 1
        return place


def _group(
    id: str, birth: Birth, task_hash: str, members: Sequence[tuple[Episode, float]], config: RunConfig
) -> GroupRecord:
    rewards = [reward for _, reward in members]
    return GroupRecord(
        id=id,
        run=birth.run,
        task=task_hash,
        iteration=birth.iteration,
        size=len(members),
        reward_mean=statistics.fmean(rewards),
        reward_std=statistics.pstdev(rewards),
        success_rate=statistics.fmean(succeeded(episode, config) for episode, _ in members),
    )


def _trajectory(
    actors: Actors, episode: Episode, reward: float, birth: Birth, place: _Place, config: RunConfig
) -> Trajectory:
    tokens = TokenSequence.concatenate(segment.tokens for segment in episode.segments)
    action = response_mask(tokens, actors.authors)
    log_probs = tokens.behavior_log_probs[action]
    known = log_probs[~np.isnan(log_probs)]
    versions = tokens.policy_versions[tokens.policy_versions != NOT_SAMPLED]
    record = TrajectoryRecord(
        id=_identify(birth, place.task, place.member),
        run=birth.run,
        group=place.group,
        task=place.task,
        iteration=birth.iteration,
        slot=place.slot,
        member=place.member,
        attempt=birth.attempt,
        source="self",
        reward=reward,
        success=succeeded(episode, config),
        advantage=0.0,
        stop_reason=episode.stop_reason,
        error_kind=episode.error_kind,
        num_turns=episode.num_turns,
        num_tool_calls=episode.num_tool_calls,
        num_tokens=len(tokens),
        num_action_tokens=int(action.sum()),
        policy_version_min=int(versions.min()),
        policy_version_max=int(versions.max()),
        temperature=config.rollout.temperature,
        top_p=1.0,
        top_k=0,
        logprobs_mode="full",
        mean_entropy=float(np.mean(episode.entropies)),
        mean_behavior_log_prob=float(known.mean()) if len(known) else math.nan,
        min_behavior_log_prob=float(known.min()) if len(known) else math.nan,
        environment=actors.factory.name,
        environment_version=actors.factory.version,
    )
    return Trajectory(record, episode.segments, episode.messages)


def succeeded(episode: Episode, config: RunConfig) -> bool:
    """The one place that says what a success is: the environment's word, whatever else is rewarded."""
    return episode.reward >= config.rollout.success_reward


def _identify(birth: Birth, *place: str | int) -> str:
    text = "/".join(map(str, (birth.run, birth.iteration, birth.attempt, *place)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
