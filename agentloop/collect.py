"""Many episodes at once, scored against their group and written down as trajectories."""

from __future__ import annotations

import hashlib
import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import numpy as np

from agentloop.algorithms.advantages import grpo_advantages
from agentloop.config import RunConfig
from agentloop.environments import EnvironmentFactory, Task, ToolLimits
from agentloop.errors import UserError
from agentloop.generation import Completion, GenerationFailed, GenerationRequest, Generator, replies
from agentloop.rollout import Ask, Episode, EpisodeLimits, rollout
from context import (
    NOT_SAMPLED,
    AuthorTable,
    ContextManager,
    Renderer,
    ReplyParser,
    TokenSequence,
    response_mask,
)
from context.control import TrainingControl
from context.strategies import Linear, Strategy
from replay.records import GroupRecord, TaskRecord, Trajectory, TrajectoryRecord

Penalty = Callable[[Sequence[Trajectory]], list[float]]
"""What is taken off each trajectory's reward before advantages: the KL to the starting policy."""

Progress = Callable[[int, int], None]
"""Called with episodes ended and episodes in all."""

_log = logging.getLogger(__name__)
_MOST_TOLD = 20


class Problems:
    """Tells each reason for which an episode ended oddly once; of ever new ones, the first few."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, text: str) -> None:
        if text in self._told or len(self._told) == _MOST_TOLD:
            return
        self._told.add(text)
        _log.warning("%s", text)
        if len(self._told) == _MOST_TOLD:
            _log.warning("further reasons are counted, and not told")


@dataclass(frozen=True)
class Actors:
    """What an episode is run with; the same for training and for evaluation."""

    factory: EnvironmentFactory
    generator: Generator
    renderer: Renderer
    parser: ReplyParser
    authors: AuthorTable
    vocab_size: int
    """Of the policy: no token it samples has this number or a higher one."""
    strategy: Strategy = field(default_factory=Linear)
    control: TrainingControl = field(default_factory=TrainingControl)
    problems: Problems = field(default_factory=Problems)


@dataclass(frozen=True)
class Birth:
    """Where and when a batch of trajectories is born."""

    run: str
    iteration: int
    attempt: int
    """Makes ids differ from those a killed run had given."""


@dataclass
class Collected:
    """The rows of one iteration, ready to append: groups whole, advantages set."""

    tasks: list[TaskRecord] = field(default_factory=list)
    groups: list[GroupRecord] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    rewrites: Counter[str] = field(default_factory=Counter)
    """Episodes in which what was shown had been rewritten, by kind."""
    engine_failures: int = 0
    """Episodes that are in no group, as their engine failed."""

    def metrics(self) -> dict[str, float]:
        """Means over the collected trajectories; shares of every stop reason and of every kind of rewrite."""
        records = [trajectory.record for trajectory in self.trajectories]
        if not records:
            return {}
        stops = Counter(record.stop_reason for record in records)
        return {
            "rollout/success": statistics.fmean(record.success for record in records),
            "rollout/reward": statistics.fmean(record.reward for record in records),
            "rollout/turns": statistics.fmean(record.num_turns for record in records),
            "rollout/tokens": statistics.fmean(record.num_tokens for record in records),
            "rollout/engine_failures": self.engine_failures,
            "rollout/tool_errors": statistics.fmean(record.error_kind is not None for record in records),
            "context/segments": statistics.fmean(len(trajectory.segments) for trajectory in self.trajectories),
            **{f"context/rewrites/{kind}": count / len(records) for kind, count in sorted(self.rewrites.items())},
            **{f"rollout/stop/{reason}": count / len(records) for reason, count in sorted(stops.items())},
        }


def run_episodes(
    actors: Actors, tasks: Sequence[Task], config: RunConfig, *, progress: Progress | None = None
) -> Iterator[Episode]:
    """Run one episode per task, `rollout.parallel` at a time, turn by turn together; yields them in order."""
    for start in range(0, len(tasks), config.rollout.parallel):
        chunk = tasks[start : start + config.rollout.parallel]
        yield from _run_together(actors, chunk, config, partial(_tell, progress, start, len(tasks)))


def _tell(progress: Progress | None, before: int, total: int, ended: int) -> None:
    if progress is not None:
        progress(before + ended, total)


def _run_together(
    actors: Actors, tasks: Sequence[Task], config: RunConfig, tell: Callable[[int], None]
) -> list[Episode]:
    running: dict[int, Coroutine[Ask, Completion | GenerationFailed, Episode]] = {}
    asks: dict[int, Ask] = {}
    ended: dict[int, Episode] = {}

    def advance(key: int, reply: Completion | GenerationFailed | None) -> None:
        try:
            asks[key] = next(running[key]) if reply is None else running[key].send(reply)
        except StopIteration as stop:
            ended[key] = stop.value
            if ended[key].problem is not None:
                actors.problems.tell(f"episode ended with {ended[key].stop_reason}: {ended[key].problem}")
            del running[key]
            asks.pop(key, None)

    for key, task in enumerate(tasks):
        running[key] = _episode(actors, task, config)
        advance(key, None)
    while running:
        keys = sorted(running)
        requests = [GenerationRequest(key, asks[key].prompt_ids, asks[key].max_new_tokens) for key in keys]
        given = replies(actors.generator, requests, vocab_size=actors.vocab_size)
        for key, reply in zip(keys, given, strict=True):
            advance(key, reply)
        tell(len(ended))
    return [ended[key] for key in range(len(tasks))]


def _episode(actors: Actors, task: Task, config: RunConfig) -> Coroutine[Ask, Completion | GenerationFailed, Episode]:
    limits = EpisodeLimits(
        max_turns=config.rollout.max_turns,
        max_tokens_per_turn=config.rollout.max_tokens_per_turn,
        tools=ToolLimits(timeout_s=config.rollout.tool_timeout_s, max_chars=config.rollout.tool_output_chars),
    )
    context = ContextManager(
        actors.renderer,
        actors.parser,
        max_tokens=config.context.max_tokens,
        strategy=actors.strategy,
        control=actors.control,
        strict=config.context.strict,
    )
    return rollout(
        actors.factory.create(),
        task,
        context,
        tools=actors.factory.tools,
        limits=limits,
        policy_version=actors.generator.policy_version,
    )


def collect(
    actors: Actors,
    groups: Sequence[tuple[Task, int]],
    birth: Birth,
    config: RunConfig,
    *,
    penalty: Penalty | None = None,
    progress: Progress | None = None,
) -> Collected:
    """Run `size` episodes of each task and score each group; `groups` holds (task, size).

    Advantages are of rewards less `penalty`; the stored reward is the environment's own. An episode that the engine
    failed is left out of its group as if it had not been run, and so is a group that lost all of them.
    """
    tasks = [task for task, size in groups for _ in range(size)]
    everything = list(run_episodes(actors, tasks, config, progress=progress))
    episodes = whole(everything)
    collected = Collected(
        rewrites=Counter(kind for episode in episodes for kind in episode.rewrites),
        engine_failures=len(everything) - len(episodes),
    )
    seen_members: Counter[str] = Counter()
    ends = accumulate(size for _, size in groups)
    for index, ((task, size), end) in enumerate(zip(groups, ends, strict=True)):
        slot = len(collected.trajectories)
        members = [episode for episode in everything[end - size : end] if not episode.failed]
        if not members:
            continue
        task_hash = actors.factory.task_hash(task)
        group = _group(birth, index, task_hash, members, config)
        collected.tasks.append(TaskRecord(task_hash, actors.factory.name, task.payload))
        collected.groups.append(group)
        rows = []
        for offset, episode in enumerate(members):
            place = _Place(group.id, task_hash, slot + offset, seen_members[task_hash] + offset)
            rows.append(_trajectory(actors, episode, birth, place, config))
        collected.trajectories += _with_advantages(rows, config, penalty)
        seen_members[task_hash] += len(members)
    return collected


def whole(episodes: Sequence[Episode]) -> list[Episode]:
    """Those that the engine did not fail. Raises UserError if it failed them all."""
    kept = [episode for episode in episodes if not episode.failed]
    if episodes and not kept:
        raise UserError(
            f"the engine must reply to at least one of {len(episodes)} episodes, got none ({episodes[0].problem}). "
            "Mend it and --resume: this iteration is collected again."
        )
    return kept


@dataclass(frozen=True)
class _Place:
    group: str
    task: str
    slot: int
    member: int


def _group(birth: Birth, index: int, task_hash: str, members: Sequence[Episode], config: RunConfig) -> GroupRecord:
    rewards = [episode.reward for episode in members]
    return GroupRecord(
        id=_identify(birth, "group", index),
        run=birth.run,
        task=task_hash,
        iteration=birth.iteration,
        size=len(members),
        reward_mean=statistics.fmean(rewards),
        reward_std=statistics.pstdev(rewards),
        success_rate=statistics.fmean(succeeded(episode, config) for episode in members),
    )


def _trajectory(actors: Actors, episode: Episode, birth: Birth, place: _Place, config: RunConfig) -> Trajectory:
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
        reward=episode.reward,
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


def _with_advantages(rows: list[Trajectory], config: RunConfig, penalty: Penalty | None) -> list[Trajectory]:
    rewards = [row.record.reward for row in rows]
    if penalty is not None:
        rewards = [reward - taken for reward, taken in zip(rewards, penalty(rows), strict=True)]
    advantages = grpo_advantages(rewards, normalise_std=config.advantage.normalise_std)
    return [
        replace(row, record=replace(row.record, advantage=advantage))
        for row, advantage in zip(rows, advantages, strict=True)
    ]


def succeeded(episode: Episode, config: RunConfig) -> bool:
    """The one place that says what a success is."""
    return episode.reward >= config.rollout.success_reward


def _identify(birth: Birth, *place: str | int) -> str:
    text = "/".join(map(str, (birth.run, birth.iteration, birth.attempt, *place)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
