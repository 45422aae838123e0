"""Collects an iteration: plays groups of episodes, rewards them, and makes trajectories with advantages."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate

from agentloop.algorithms.catalog import ALGORITHMS
from agentloop.config import RunConfig
from agentloop.environments import Task
from agentloop.environments.simulated_user import UserCosts
from agentloop.environments.tools.call import POLICY_ERRORS
from agentloop.errors import UserError, shortened
from agentloop.records import Penalty, kl_penalties, penalised_rewards
from agentloop.rollouts.actors import Actors
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.episodes.run_episodes import Progress, run_episodes
from agentloop.rollouts.rewards import RewardScorer
from agentloop.rollouts.trajectories import Collected, CollectedBy, MemberPlace, task_record, trajectory_of
from replay.records import StopReason, Trajectory, group_of

_MANY_FAILED_CALLS, _FEW_FAILED_CALLS = 0.2, 2
"""A warning appears if more than this share, and at least this number, of a tool's calls in an iteration failed."""
AdvantagesOfGroups = Callable[[Sequence[Trajectory], Sequence[float], Mapping[str, float]], list[Trajectory]]
"""Sets the advantages of one iteration's whole groups from the rows' rewards and each task's greedy reward."""


@dataclass(frozen=True)
class Collector:
    """Plays the groups of an iteration and makes their records, with rewards and advantages."""

    actors: Actors
    config: RunConfig
    scorer: RewardScorer
    advantages_of: AdvantagesOfGroups
    penalty: Penalty | None = None
    """The current KL penalty; None: rewards have no KL penalty."""

    def collect(
        self,
        groups: Sequence[tuple[Task, int]],
        collected_by: CollectedBy,
        *,
        earlier: Sequence[Collected] = (),
        progress: Progress = lambda *_: None,
    ) -> Collected:
        """Run `size` episodes of each task of `groups`, and set advantages from the rewards less the penalty.

        An episode that the engine or a reward function failed is left out, as if it had never run. `earlier` are rounds
        of the same iteration, whose ids must not be repeated. Raises UserError if no episode remains.
        """
        tasks = [task for task, size in groups for _ in range(size)]
        tried = partial(self.scorer.try_on, judges=False)
        everything = list(run_episodes(self.actors, tasks, self.config, progress=progress, tried=tried))
        scores = self.scorer.score(everything)
        everything = scores.episodes
        for problem in scores.problems.values():
            self.actors.warnings.warn(f"reward.functions: {shortened(problem)}")
        # In a further round every episode may fail, because the first round's groups remain.
        kept = [episode for episode in everything if not episode.failed]
        episodes = kept if earlier else without_engine_failures(everything)
        collected = Collected(
            rewrites=Counter(kind for episode in episodes for kind in episode.rewrites),
            engine_failures=sum(episode.stop_reason == StopReason.ENGINE_FAILURE for episode in everything),
            not_judged=sum(episode.stop_reason == StopReason.NOT_JUDGED for episode in everything),
            extra_metrics=scores.metrics | _calls(self.actors, episodes) | _user_costs(everything),
        )
        if self.scorer.can_fail:
            unknown = sum(math.isnan(total) for total in scores.totals)
            lost = collected.engine_failures + collected.not_judged
            collected.extra_metrics["rollout/reward_failures"] = unknown - lost
        self._add_groups(collected, groups, everything, scores.totals, collected_by, earlier)
        if episodes and not collected.trajectories and not earlier:
            raise UserError(
                f"reward.functions must give a reward to at least one of {len(episodes)} episodes, got none."
            )
        self._add_advantages(collected, self._greedy_rewards([task for task, _ in groups], collected_by, collected))
        return collected

    def _add_groups(
        self,
        collected: Collected,
        groups: Sequence[tuple[Task, int]],
        episodes: Sequence[Episode],
        rewards: Sequence[float],
        collected_by: CollectedBy,
        earlier: Sequence[Collected],
    ) -> None:
        """Add a record for each episode with a reward and each group with such an episode, numbered after `earlier`."""
        before = [row.record.task for round in earlier for row in round.trajectories]
        made, first_group = Counter(before), sum(len(round.groups) for round in earlier)
        ends = accumulate(size for _, size in groups)
        for (task, size), end in zip(groups, ends, strict=True):
            span = range(end - size, end)
            members = [(episodes[i], rewards[i]) for i in span if not math.isnan(rewards[i])]
            if not members:
                continue
            factory = self.actors.environments.factory_for(task)
            task_hash = factory.task_hash(task)
            group = collected_by.id_of("group", first_group + len(collected.groups))
            first_slot, first_member = len(before) + len(collected.trajectories), made[task_hash]
            rows = []
            for number, (episode, reward) in enumerate(members):
                slot, member = first_slot + number, first_member + number
                place = MemberPlace(collected_by.id_of(task_hash, member), group, task_hash, slot, member)
                rows.append(trajectory_of(self.actors, episode, reward, collected_by, place, self.config))
            made[task_hash] += len(rows)
            collected.tasks.append(task_record(factory, task))
            collected.groups.append(group_of(rows))
            collected.trajectories += rows

    def _add_advantages(self, collected: Collected, greedy: Mapping[str, float]) -> None:
        rows = collected.trajectories
        penalties = kl_penalties(self.penalty, rows)
        rewards = penalised_rewards(rows, penalties)
        collected.kl_penalties = {row.id: penalty for row, penalty in zip(rows, penalties, strict=True)}
        collected.rewards = {row.id: reward for row, reward in zip(rows, rewards, strict=True)}
        collected.trajectories = self.advantages_of(rows, rewards, greedy)

    def _greedy_rewards(
        self, tasks: Sequence[Task], collected_by: CollectedBy, collected: Collected
    ) -> dict[str, float]:
        """For `algorithm: remax`, run one greedy episode per task and return its reward less penalty by task hash."""
        if not ALGORITHMS[self.config.algorithm].greedy_episodes or not tasks:
            return {}
        by_hash = {self.actors.environments.task_hash(task): task for task in tasks}
        self.actors.generator.begin(seed=0, temperature=0.0)
        scores = self.scorer.score(list(run_episodes(self.actors, list(by_hash.values()), self.config)))
        rows = []
        for task, episode, total in zip(by_hash, scores.episodes, scores.totals, strict=True):
            if not math.isnan(total):
                place = MemberPlace(collected_by.id_of(task, 0), "", task, slot=0, member=0)
                row = trajectory_of(self.actors, episode, total, collected_by, place, self.config)
                rows.append(replace(row, record=replace(row.record, temperature=1.0)))
        collected.extra_metrics["rollout/greedy_failures"] = len(by_hash) - len(rows)
        if rows:
            collected.extra_metrics["rollout/greedy_reward"] = statistics.fmean(row.record.reward for row in rows)
        rewards = penalised_rewards(rows, kl_penalties(self.penalty, rows))
        return {row.record.task: reward for row, reward in zip(rows, rewards, strict=True)}


def _calls(actors: Actors, episodes: Sequence[Episode]) -> dict[str, float]:
    """Compute the metrics of tool calls, and warn of tools that fail."""
    failed_closes = sum(episode.close_problem is not None for episode in episodes)
    metrics: dict[str, float] = {"rollout/failed_closes": failed_closes} if failed_closes else {}
    made = sum(episode.num_tool_calls for episode in episodes)
    failed = sum(episode.num_failed_calls for episode in episodes)
    if not made:
        return metrics
    _warn_of_failing_tools(actors, episodes)
    in_tools, in_replies = (sum(getattr(e, name) for e in episodes) for name in ("tool_seconds", "reply_seconds"))
    run_seconds: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, seconds in episode.run_seconds.items():
            run_seconds[name].extend(seconds)
    if actors.memory is not None:
        metrics["tools/replayed"] = sum(episode.num_replayed_calls for episode in episodes) / made
    return {
        **metrics,
        "rollout/failed_calls": failed / made,
        "tools/runs": float(sum(episode.num_tool_runs for episode in episodes)),
        "time/in_tools": in_tools / max(in_tools + in_replies, 1e-9),
        "time/reply": in_replies / max(sum(episode.num_turns for episode in episodes), 1),
        **{f"time/tool/{name}": statistics.fmean(seconds) for name, seconds in run_seconds.items()},
    }


def _warn_of_failing_tools(actors: Actors, episodes: Sequence[Episode]) -> None:
    """Log a warning, once per run and tool, if many calls of the tool failed."""
    calls: dict[str, list[bool]] = defaultdict(list)
    for message in (message for episode in episodes for message in episode.messages if message.role == "tool"):
        if message.error_kind not in POLICY_ERRORS:
            calls[str(message.name)].append(message.error_kind is not None)
    first = {name: problem for episode in reversed(episodes) for name, problem in episode.tool_problems.items()}
    for name, problem in first.items():
        failed, made = sum(calls[name]), len(calls[name])
        if failed >= _FEW_FAILED_CALLS and failed > _MANY_FAILED_CALLS * made:
            actors.warnings.warn(
                f"tool {name} must seldom fail, got {failed} failed of its {made} calls in one iteration (logged once, "
                f"above {_MANY_FAILED_CALLS:.0%}), the first with {problem}. The policy was shown each error. Mend the "
                "tool, or say in its docstring what it takes.",
                reason=f"tool {name} fails",
            )


def _user_costs(episodes: Sequence[Episode]) -> dict[str, float]:
    """Sum what simulated users took in all episodes, those without a verdict included; empty where there is no user."""
    costs = [episode.user for episode in episodes if episode.user is not None]
    if not costs:
        return {}
    return {f"user/{part.name}": float(sum(getattr(cost, part.name) for cost in costs)) for part in fields(UserCosts)}


def without_engine_failures(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes that count. Raises UserError if the engine or the environment failed all of them."""
    kept = [episode for episode in episodes if not episode.failed]
    if episodes and not kept:
        of, got = f"{len(episodes)} episodes", f"got none ({episodes[0].problem}). Mend"
        if episodes[0].stop_reason == StopReason.NOT_JUDGED:
            raise UserError(f"the environment must come to a verdict on at least one of {of}, {got} it or its judge.")
        raise UserError(f"the engine must reply to at least one of {of}, {got} it.")
    return kept
