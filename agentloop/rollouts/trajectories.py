"""Turns episodes into records: one group per task, one trajectory per episode, with ids that a rerun repeats."""

import hashlib
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import dropwhile

import numpy as np

from agentloop.config import RunConfig
from agentloop.environments import EnvironmentFactory, RunEnvironments, Task
from agentloop.records import KlPenalty, kl_metrics
from agentloop.rollouts.actors import Actors
from agentloop.rollouts.episodes.episode import Episode
from context.authors import LLM
from context.messages import Message, canonical_json
from replay.records import GroupRecord, TaskRecord, Trajectory, TrajectoryRecord
from replay.storage.validate import summarised


@dataclass(frozen=True)
class CollectedBy:
    """The run, iteration and attempt that collect trajectories."""

    run: str
    iteration: int
    attempt: int
    """Number of resumes, so that ids differ from those of the killed attempt."""

    def id_of(self, *place: str | int) -> str:
        """Make the id of a place, which is equal in every process."""
        text = "/".join(map(str, (self.run, self.iteration, self.attempt, *place)))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass
class Collected:
    """The rows of one iteration, ready to append: whole groups with advantages."""

    tasks: list[TaskRecord] = field(default_factory=list)
    groups: list[GroupRecord] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    rewrites: Counter[str] = field(default_factory=Counter)
    """Number of episodes whose context was rewritten, by kind of rewrite."""
    engine_failures: int = 0
    """Number of episodes that are in no group because their engine failed."""
    not_judged: int = 0
    """Number of episodes that are in no group because nobody could judge them."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Reward less KL penalty, by trajectory id."""
    kl_penalties: dict[str, KlPenalty] = field(default_factory=dict)
    extra_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that the rows do not show: parts of rewards, greedy episodes, rounds."""
    unused_groups: list[GroupRecord] = field(default_factory=list)
    unused: list[Trajectory] = field(default_factory=list)
    """Rows of groups that dynamic sampling replaced or did not need; they are stored, but are in no batch."""
    further_tasks: tuple[int, ...] = ()
    """Indices of the training tasks that dynamic sampling used beyond the planned ones."""

    def metrics(self) -> dict[str, float]:
        """Average figures over the trajectories, whether a batch uses them or not."""
        rows, groups = [*self.trajectories, *self.unused], [*self.groups, *self.unused_groups]
        if not rows:
            return {}
        records, repeated = [row.record for row in rows], repeated_calls(rows)
        stops = Counter(record.stop_reason for record in records)
        return {
            "rollout/groups_without_signal": statistics.fmean(group.reward_std == 0 for group in groups),
            **({} if repeated is None else {"tools/repeated": repeated}),
            "rollout/success": statistics.fmean(record.success for record in records),
            "rollout/reward": statistics.fmean(record.reward for record in records),
            "rollout/turns": statistics.fmean(record.num_turns for record in records),
            "rollout/tokens": statistics.fmean(record.num_tokens for record in records),
            "rollout/tool_errors": statistics.fmean(record.error_kinds is not None for record in records),
            "context/segments": statistics.fmean(len(trajectory.segments) for trajectory in rows),
            **{f"rollout/stop/{reason}": count / len(records) for reason, count in sorted(stops.items())},
            "rollout/engine_failures": self.engine_failures,
            **({"rollout/not_judged": self.not_judged} if self.not_judged else {}),
            **{f"context/rewrites/{kind}": count / len(rows) for kind, count in sorted(self.rewrites.items())},
            **kl_metrics(self.kl_penalties.values()),
            **self.extra_metrics,
        }


@dataclass(frozen=True)
class MemberPlace:
    """The place of a trajectory in its iteration, with the trajectory's id."""

    id: str
    group: str
    task: str
    slot: int
    member: int


def task_record(factory: EnvironmentFactory, task: Task) -> TaskRecord:
    tools = None if task.tools is None else canonical_json(task.tools)
    return TaskRecord(factory.task_hash(task), factory.name, task.payload, tools)


def trajectory_of(
    actors: Actors, episode: Episode, reward: float, collected_by: CollectedBy, place: MemberPlace, config: RunConfig
) -> Trajectory:
    """Make the record of an episode; its advantage is set later."""
    factory = actors.environments.factory_for(episode.task)
    agents = {agent: (earned, 0.0) for agent, earned in episode.agent_rewards.items()}
    record = TrajectoryRecord(
        id=place.id,
        run=collected_by.run,
        group=place.group,
        task=place.task,
        iteration=collected_by.iteration,
        slot=place.slot,
        member=place.member,
        attempt=collected_by.attempt,
        reward=reward,
        success=succeeded(episode, config),
        advantage=0.0,
        stop_reason=str(episode.stop_reason),
        error_kinds=" ".join(episode.error_kinds) or None,
        num_turns=episode.num_turns,
        num_tool_calls=episode.num_tool_calls,
        num_user_turns=num_user_turns(episode.messages),
        temperature=config.rollout.temperature,
        top_p=1.0,
        top_k=0,
        logprobs_mode="full",
        mean_entropy=float(np.mean(episode.entropies)) if episode.entropies else None,
        environment=factory.name,
        environment_version=factory.version,
        source="gateway" if episode.nodes else "self",
        agent_rewards=canonical_json(agents) if agents else None,
    )
    (row,) = summarised([Trajectory(record, episode.segments, episode.messages, episode.nodes)], actors.authors)
    return row


def num_user_turns(messages: Sequence[Message]) -> int:
    """Count the messages of a user after the first sampled reply."""
    after = dropwhile(lambda message: message.author != LLM, messages)
    return sum(message.role == "user" for message in after)


def succeeded(episode: Episode, config: RunConfig) -> bool:
    """True if the environment's reward, or that of the function in its place, is a success. No other part counts."""
    return episode.environment_reward >= config.rollout.success_reward


def repeated_calls(rows: Sequence[Trajectory]) -> float | None:
    """Compute the share of calls that repeat another row's call of the task after equal calls; None without calls."""
    made, seen = 0, set[tuple[str, ...]]()
    for row in rows:
        history: tuple[str, ...] = (row.record.task,)
        for call in (call for message in row.messages if message.author == LLM for call in message.tool_calls):
            arguments = {name: repr(value) for name, value in call.arguments.items()}
            history = (*history, canonical_json([call.name, arguments]))
            made += 1
            seen.add(history)
    return 1.0 - len(seen) / made if made else None


def environment_metrics(environments: RunEnvironments, rows: Sequence[Trajectory]) -> dict[str, float]:
    """Count fresh episodes and average their success and reward, for each of several environments."""
    if len(environments.all) == 1:
        return {}
    metrics: dict[str, float] = {}
    for name in environments.by_name:
        records = [row.record for row in rows if row.record.environment == name]
        metrics[f"environment/{name}/episodes"] = float(len(records))
        if records:
            metrics[f"environment/{name}/success"] = statistics.fmean(record.success for record in records)
            metrics[f"environment/{name}/reward"] = statistics.fmean(record.reward for record in records)
    return metrics
