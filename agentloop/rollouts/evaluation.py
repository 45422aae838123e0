"""Measures success on held-out tasks: each evaluation has the same tasks and samples with the same seed."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import groupby
from typing import Any

from pydantic_core import to_jsonable_python

from agentloop.config import RunConfig
from agentloop.config.seeds import derive_seed
from agentloop.environments import POLICY_ERRORS, Task, TaskSource
from agentloop.errors import UserError
from agentloop.rollouts.actors import Actors
from agentloop.rollouts.collect import without_engine_failures
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.episodes.run_episodes import Progress, run_episodes
from agentloop.rollouts.rewards import RewardScorer
from agentloop.rollouts.trajectories import succeeded
from agentloop.runs.confidence_intervals import CONFIDENCE, Estimate, bootstrap, pass_at_k, pass_hat_k, proportion
from context.wording import suggest
from replay.records import WHOLE_ENDS, HeldOutEpisode


@dataclass(frozen=True)
class Outcome:
    """The result of one held-out episode."""

    success: bool
    reward: float
    turns: int
    stop_reason: str
    num_tool_calls: int
    """Calls of a tool that exists, with arguments that it takes: a model that can't call makes none."""
    problem: str | None = None
    """What went wrong, in words, where the episode says so."""


@dataclass(frozen=True)
class Attempts:
    """The outcomes of one task's samples, at least one, without the samples that the engine failed."""

    outcomes: tuple[Outcome, ...]
    environment: str | None = None
    """Name of the task's environment in a run with several; None in a run with one."""
    task: str = ""
    """The task's hash; empty where workers have played it."""
    category: str | None = None
    """Value of the field of the payload by which success is reported; None without such a field."""

    def mean(self, figure: Callable[[Outcome], float]) -> float:
        """The mean of a figure of the samples."""
        return sum(map(figure, self.outcomes)) / self.samples

    @property
    def samples(self) -> int:
        return len(self.outcomes)

    @property
    def successes(self) -> int:
        return sum(outcome.success for outcome in self.outcomes)


def outcome_of(episode: Episode, config: RunConfig) -> Outcome:
    wrong = sum(kind in POLICY_ERRORS for kind in episode.error_kinds)
    how = (episode.num_turns, str(episode.stop_reason), episode.num_tool_calls - wrong, episode.problem)
    return Outcome(succeeded(episode, config), episode.environment_reward, *how)


@dataclass(frozen=True)
class Evaluation:
    attempts: tuple[Attempts, ...]
    """One per task with a sample that the engine did not fail."""
    samples: int
    """Configured number of samples per task."""
    engine_failures: int
    """Samples that do not count, because the engine or the judge failed and their success is unknown."""
    has_tools: bool
    episodes: tuple[tuple[int, Episode], ...] = ()
    """The samples that count and that this process ran, each with its place."""
    by: str | None = None
    """The field of the payload that names a task's category; None: there are no categories."""

    @property
    def tasks(self) -> int:
        return len(self.attempts)

    @property
    def success(self) -> float:
        """pass@1: the share of samples that succeed, with equal weight for each task."""
        return self._mean(lambda outcome: outcome.success)

    def pass_at(self, k: int, *, estimator: Callable[[int, int, int], float] = pass_at_k) -> list[float]:
        """Estimate pass@k, or another figure of k samples, for each task with at least k samples."""
        return [estimator(task.samples, task.successes, k) for task in self.attempts if task.samples >= k]

    @property
    def why_none_succeeded(self) -> str | None:
        """Explain how the episodes failed and what helps; None if one succeeded."""
        episodes = [outcome for task in self.attempts for outcome in task.outcomes]
        if any(episode.success for episode in episodes):
            return None
        count, cut = len(episodes), [one for one in episodes if one.stop_reason not in WHOLE_ENDS]
        called, on_the_way = (sum(one.num_tool_calls > 0 for one in some) for some in (episodes, cut))
        remedy = "Show it how first: agentloop sft on demonstrations"
        if 2 * len(cut) > count and (4 * on_the_way > len(cut) or not self.has_tools):
            remedy = "Raise rollout.max_tokens_per_turn, rollout.max_turns or context.max_tokens"
        problems = Counter(one.problem for one in episodes if one.problem is not None)
        if 2 * problems.total() > count:
            remedy = "{1} of them: {0}".format(*problems.most_common(1)[0])
        calls = f", {called} called a tool" if self.has_tools else ""
        how = f"{count - len(cut)} answered wrong, {len(cut)} did not come to an answer{calls}"
        return f"none of {count} episodes succeeded: {how}. {remedy}"

    def metrics(self) -> dict[str, float]:
        several = self.pass_at(self.samples) if self.samples > 1 else []
        return {
            **{f"eval/{name}": value for name, value in self._figures().items()},
            "eval/tasks": self.tasks,
            "eval/turns": self._mean(lambda outcome: outcome.turns),
            "eval/engine_failures": self.engine_failures,
            **({f"eval/pass_at_{self.samples}": sum(several) / len(several)} if several else {}),
            **{
                f"environment/{name}/held_out_{figure}": value
                for name in self.environments
                for figure, value in self.restricted_to(name)._figures().items()
            },
        }

    def restricted_to(self, name: str) -> Evaluation:
        """Leave only the tasks of one of several environments."""
        return replace(self, attempts=tuple(task for task in self.attempts if task.environment == name))

    @property
    def environments(self) -> list[str]:
        """Names of the environments with tasks here, in their order; empty in a run with one environment."""
        return list(dict.fromkeys(task.environment for task in self.attempts if task.environment is not None))

    def _figures(self) -> dict[str, float]:
        return {"success": self.success, "reward": self._mean(lambda outcome: outcome.reward)}

    def _mean(self, figure: Callable[[Outcome], float]) -> float:
        return sum(task.mean(figure) for task in self.attempts) / len(self.attempts)


@dataclass(frozen=True)
class Evaluated:
    """The policy that was evaluated, and the environment."""

    run: str
    """Folder of a training run or of an sft run, or name and address of a served model."""
    policy_version: int | None
    """Publishes before the checkpoint; None for an sft run."""
    checkpoint: str
    environment: str
    environment_version: str

    def __str__(self) -> str:
        policy = "" if self.policy_version is None else f"policy {self.policy_version} "
        whose = self.run if self.run == self.checkpoint else f"{self.run}: {policy}({self.checkpoint})"
        return f"{whose}, environment {self.environment} {self.environment_version}"


@dataclass(frozen=True, repr=False)
class EvaluationReport:
    """An evaluation with 95 % confidence intervals."""

    evaluated: Evaluated
    evaluation: Evaluation
    pass_at_k: Mapping[int, Estimate]
    """pass@k, that one of k samples succeeds, for k = 1, 2, 4, ... and the number of samples."""
    pass_hat_k: Mapping[int, Estimate]
    """pass^k, that all k samples succeed, for the same k."""
    mean_reward: Estimate
    mean_turns: Estimate
    stop_reasons: Mapping[str, Estimate]
    """The share of samples with each stop reason, the most frequent first."""
    environments: Mapping[str, Estimate]
    """Success in each of several environments; empty where there is one."""
    categories: Mapping[str, Estimate]
    """Success in each category; empty where the evaluation has none."""

    def __repr__(self) -> str:
        """Write a line per figure, as a notebook shows it. The episodes are in `evaluation`."""
        figures = {f"pass@{k}": found for k, found in self.pass_at_k.items()}
        figures |= {f"pass^{k}": found for k, found in self.pass_hat_k.items()}
        figures |= {"mean reward": self.mean_reward, "mean turns": self.mean_turns}
        return "\n".join(f"{name} {one.value:.3f} ({one.low:.3f}-{one.high:.3f})" for name, one in figures.items())

    def to_json(self) -> dict[str, Any]:
        names = ("tasks", "samples", "engine_failures", "success", "by")
        facts = {name: getattr(self.evaluation, name) for name in names}
        found = {field.name: to_jsonable_python(getattr(self, field.name)) for field in fields(self)[2:]}
        attempts = self.evaluation.attempts
        per_task = [{**asdict(task), "samples": task.samples, "successes": task.successes} for task in attempts]
        return {**asdict(self.evaluated), **facts, "confidence": CONFIDENCE, **found, "per_task": per_task}


def evaluate(
    actors: Actors,
    source: TaskSource,
    config: RunConfig,
    *,
    scorer: RewardScorer,
    progress: Progress = lambda *_: None,
    by: str | None = None,
) -> Evaluation:
    """Run `evaluation.samples` episodes on each held-out task, without the buffer; `by` is the categories' field."""
    section = config.evaluation
    tasks = source.held_out(section.tasks)
    about = [(task.environment, actors.environments.task_hash(task), category_of(task, by)) for task in tasks]
    actors.generator.begin(seed=derive_seed(config.run.seed, "evaluate"), temperature=section.temperature)
    each = [task for task in tasks for _ in range(section.samples)]
    tried = partial(scorer.try_on, judges=True)
    everything = list(run_episodes(actors, each, config, progress=progress, tried=tried))
    without_engine_failures(everything)
    everything = scorer.judge(everything)
    lost = sum(math.isnan(episode.environment_reward) for episode in everything)
    judged = [(place, e) for place, e in enumerate(everything) if not math.isnan(e.environment_reward)]
    attempts = [
        Attempts(tuple(outcome_of(episode, config) for _, episode in samples), *about[number])
        for number, samples in groupby(judged, key=lambda each: each[0] // section.samples)
    ]
    if not attempts:
        raise UserError(
            f"reward.functions must judge at least one of {len(everything)} held-out episodes, got none. "
            "Mend the first of them."
        )
    has_tools = bool(actors.environments.tools)
    return Evaluation(tuple(attempts), section.samples, lost, has_tools, tuple(judged), by)


def category_of(task: Task, by: str | None) -> str | None:
    """Read the field of the payload that names the task's category. Raises UserError where there is none."""
    if by is None:
        return None
    if by not in task.payload:
        raise UserError(f"--by must name a field that each task's payload has, got {by}. {suggest(by, task.payload)}")
    value = task.payload[by]
    return value if isinstance(value, str) else json.dumps(value)


def held_out_episode(
    actors: Actors, episode: Episode, config: RunConfig, *, run: str, iteration: int, number: int
) -> HeldOutEpisode:
    """Make the record of an evaluation's episode, which is stored apart from trajectories to train on."""
    outcome, factory = outcome_of(episode, config), actors.environments.factory_for(episode.task)
    return HeldOutEpisode(
        run=run,
        iteration=iteration,
        number=number,
        task=factory.task_hash(episode.task),
        environment=factory.name,
        environment_version=factory.version,
        reward=outcome.reward,
        success=outcome.success,
        stop_reason=outcome.stop_reason,
        error_kinds=" ".join(episode.error_kinds) or None,
        num_turns=outcome.turns,
        num_tool_calls=episode.num_tool_calls,
        messages=episode.messages,
    )


def report(evaluated: Evaluated, evaluation: Evaluation, *, seed: int) -> EvaluationReport:
    """Estimate an evaluation's figures with their intervals; `seed` decides the bootstrap's draws."""
    attempts = evaluation.attempts
    most = max(task.samples for task in attempts)
    share_of = partial(proportion, single=evaluation.samples == 1, seed=seed)
    powers = sorted({*(1 << power for power in range(most.bit_length())), most})
    categories = sorted({task.category for task in attempts if task.category is not None})
    stops = Counter(outcome.stop_reason for task in attempts for outcome in task.outcomes)
    return EvaluationReport(
        evaluated,
        evaluation,
        {k: share_of(evaluation.pass_at(k)) for k in powers},
        {k: share_of(evaluation.pass_at(k, estimator=pass_hat_k)) for k in powers},
        bootstrap([task.mean(lambda outcome: outcome.reward) for task in attempts], seed=seed),
        bootstrap([task.mean(lambda outcome: outcome.turns) for task in attempts], seed=seed),
        {
            reason: share_of([sum(o.stop_reason == reason for o in task.outcomes) / task.samples for task in attempts])
            for reason, _ in sorted(stops.items(), key=lambda item: (-item[1], item[0]))
        },
        {name: share_of(evaluation.restricted_to(name).pass_at(1)) for name in evaluation.environments},
        {name: share_of([a.successes / a.samples for a in attempts if a.category == name]) for name in categories},
    )
