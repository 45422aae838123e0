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

from agentloop.config import RunConfig
from agentloop.environments import EnvironmentFactory, Task, ToolLimits
from agentloop.errors import UserError
from agentloop.generation import Completion, GenerationFailed, GenerationRequest, Generator, replies
from agentloop.penalty import Charge, kl_metrics
from agentloop.rollout import Ask, Episode, EpisodeLimits, rollout
from agentloop.valuation import Valuation, net
from context import AuthorTable, ContextManager, Renderer, ReplyParser
from context.control import TrainingControl
from context.strategies import Linear, Strategy
from replay.records import GroupRecord, TaskRecord, Trajectory, TrajectoryRecord
from replay.storage.format.summary import summarised

Progress = Callable[[int, int], None]
"""Called with episodes ended and episodes in all."""

_log = logging.getLogger(__name__)
_MOST_TOLD = 20
_MANY_FAILED_CALLS = 0.2
"""Share of an iteration's tool calls from which on a warning says that the tools fail."""


class Problems:
    """Tells each reason for which an episode ended oddly once; of ever new ones, the first few."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, text: str, *, reason: str | None = None) -> None:
        """`reason`: what makes it the same as another one; the text itself when left out."""
        reason = reason or text
        if reason in self._told or len(self._told) == _MOST_TOLD:
            return
        self._told.add(reason)
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
    worth: dict[str, float] = field(default_factory=dict)
    """Reward less penalty, by id."""
    charges: dict[str, Charge] = field(default_factory=dict)
    """What each was charged for its distance from the reference, by id."""
    told: dict[str, float] = field(default_factory=dict)
    """Metrics of what came before the groups: parts of rewards, greedy episodes, rounds."""
    spare_groups: list[GroupRecord] = field(default_factory=list)
    spare: list[Trajectory] = field(default_factory=list)
    """Rows of groups that were replaced, or not needed: stored, and in no batch."""
    further_tasks: tuple[int, ...] = ()
    """Indices of the training tasks that were taken beyond the planned ones."""

    def metrics(self) -> dict[str, float]:
        """Means over the collected trajectories; shares of every stop reason and of every kind of rewrite."""
        rows = [*self.trajectories, *self.spare]
        records = [trajectory.record for trajectory in rows]
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
            "context/segments": statistics.fmean(len(trajectory.segments) for trajectory in rows),
            **{f"context/rewrites/{kind}": count / len(records) for kind, count in sorted(self.rewrites.items())},
            **{f"rollout/stop/{reason}": count / len(records) for reason, count in sorted(stops.items())},
            **kl_metrics(self.charges.values()),
            **self.told,
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
    valuation: Valuation | None = None,
    before: Sequence[Collected] = (),
    progress: Progress | None = None,
) -> Collected:
    """Run `size` episodes of each task and score each group; `groups` holds (task, size).

    The stored reward is the weighted sum of all rewards; advantages are of it less the penalty. An episode that the
    engine or a reward function failed is left out of its group as if it had not been run, and so is a group that lost
    all of them. `before` are the earlier rounds of the same iteration, whose ids must not come again.

    Raises UserError if nothing at all is left.
    """
    valuation = valuation or Valuation.of(config)
    tasks = [task for task, size in groups for _ in range(size)]
    everything = list(run_episodes(actors, tasks, config, progress=progress))
    scores = valuation.scorer.score(everything)
    # Of a further round, everything may fail: the first one's groups are there.
    episodes = [episode for episode in everything if not episode.failed] if before else whole(everything)
    collected = Collected(
        rewrites=Counter(kind for episode in episodes for kind in episode.rewrites),
        engine_failures=len(everything) - len(episodes),
        told=scores.metrics(),
    )
    collected.told |= _failed_calls(actors.problems, episodes)
    if valuation.scorer.can_fail:
        unknown = sum(math.isnan(total) for total in scores.totals)
        collected.told["rollout/reward_failures"] = unknown - collected.engine_failures
    places = _Places(birth, before)
    ends = accumulate(size for _, size in groups)
    for (task, size), end in zip(groups, ends, strict=True):
        span = range(end - size, end)
        members = [(everything[i], scores.totals[i]) for i in span if not math.isnan(scores.totals[i])]
        if not members:
            continue
        task_hash = actors.factory.task_hash(task)
        group = _group(places.next_group(), birth, task_hash, members, config)
        collected.tasks.append(TaskRecord(task_hash, actors.factory.name, task.payload))
        collected.groups.append(group)
        for episode, total in members:
            place = places.next_member(group.id, task_hash)
            collected.trajectories.append(_trajectory(actors, episode, total, birth, place, config))
    if episodes and not collected.trajectories and not before:
        raise UserError(
            f"reward.functions must give a reward to at least one of {len(episodes)} episodes, got none. "
            "Mend them and --resume: this iteration is collected again."
        )
    greedy = _greedy_worth(actors, [task for task, _ in groups], birth, config, valuation, collected)
    charges = valuation.charges(collected.trajectories)
    worth = net(collected.trajectories, charges)
    collected.charges = {row.id: charge for row, charge in zip(collected.trajectories, charges, strict=True)}
    advantages = valuation.estimator.at_birth(collected.trajectories, worth, greedy)
    collected.worth = {row.id: value for row, value in zip(collected.trajectories, worth, strict=True)}
    collected.trajectories = [
        replace(row, record=replace(row.record, advantage=advantage))
        for row, advantage in zip(collected.trajectories, advantages, strict=True)
    ]
    return collected


def _failed_calls(problems: Problems, episodes: Sequence[Episode]) -> dict[str, float]:
    """The share of tool calls in which the tool failed; nothing where none was made. A high one is told once a run."""
    made = sum(episode.num_tool_calls for episode in episodes)
    failed = sum(episode.num_failed_calls for episode in episodes)
    if not made:
        return {}
    if failed > _MANY_FAILED_CALLS * made:
        example = next(episode.tool_problem for episode in reversed(episodes) if episode.tool_problem is not None)
        problems.tell(
            f"tools must seldom fail, got {failed} failed of {made} calls in one iteration (told once, above "
            f"{_MANY_FAILED_CALLS:.0%}), the last with {example}. The policy was shown each error; mend the tool.",
            reason="failed tool calls",
        )
    return {"rollout/failed_calls": failed / made}


def _greedy_worth(
    actors: Actors,
    tasks: Sequence[Task],
    birth: Birth,
    config: RunConfig,
    valuation: Valuation,
    collected: Collected,
) -> dict[str, float]:
    """What one greedy episode per task is worth, by its hash: its reward less the penalty the sampled ones pay too.

    Nothing else is kept of it. Its log-probs are those of temperature 1.
    """
    if not (valuation.estimator.asks_greedy and tasks):
        return {}
    by_hash = {actors.factory.task_hash(task): task for task in tasks}
    actors.generator.begin(seed=0, temperature=0.0)
    episodes = list(run_episodes(actors, list(by_hash.values()), config))
    totals = valuation.scorer.score(episodes).totals
    rows = [
        _trajectory(actors, episode, total, birth, _Place("", task, slot=0, member=0), config)
        for task, episode, total in zip(by_hash, episodes, totals, strict=True)
        if not math.isnan(total)
    ]
    collected.told["rollout/greedy_failures"] = len(totals) - len(rows)
    if rows:
        collected.told["rollout/greedy_reward"] = statistics.fmean(row.record.reward for row in rows)
    rows = [replace(row, record=replace(row.record, temperature=1.0)) for row in rows]
    return {row.record.task: value for row, value in zip(rows, valuation.worth(rows), strict=True)}


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
        temperature=config.rollout.temperature,
        top_p=1.0,
        top_k=0,
        logprobs_mode="full",
        mean_entropy=float(np.mean(episode.entropies)),
        environment=actors.factory.name,
        environment_version=actors.factory.version,
    )
    (row,) = summarised([Trajectory(record, episode.segments, episode.messages)], actors.authors)
    return row


def succeeded(episode: Episode, config: RunConfig) -> bool:
    """The one place that says what a success is: the environment's word, whatever else is rewarded."""
    return episode.reward >= config.rollout.success_reward


def _identify(birth: Birth, *place: str | int) -> str:
    text = "/".join(map(str, (birth.run, birth.iteration, birth.attempt, *place)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
