"""Rewards ended episodes by the environment's score and the user's reward functions."""

import asyncio
import inspect
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agentloop.config import RunConfig
from agentloop.config.sections.reward import RewardFunctionSection, RewardSection
from agentloop.environments import RunEnvironments
from agentloop.environments.environment import Task, quoted_task
from agentloop.environments.tools.worker_threads import WorkerThreads, run_coroutine
from agentloop.errors import NotJudged, UserCodeFailed, UserError, one_line, shortened
from agentloop.rollouts.episodes.episode import Episode
from agentloop.user_code import load_function, shown_name, users_code
from context.wording import suggest
from replay.records import StopReason

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
Value = float | str | NotJudged
"""What a reward function gives for an episode: a number, why it gave none, or that nobody can judge it."""
_RULE = "reward.functions must take one argument, the ended episode, and after it columns of the task by name"


class RewardFunction:
    """A user's function of an ended episode; further parameters are filled from columns of the task's payload."""

    def __init__(self, section: RewardFunctionSection) -> None:
        """Runs the file of the function. Raises UserError if the function can't be called this way."""
        self.section = section
        self._function: Callable[..., Any] = load_function(section.function, what="reward.functions")
        self.waits = inspect.iscoroutinefunction(self._function)
        parameters = list(inspect.signature(self._function).parameters.values())
        others = parameters[1:]
        named = [parameter for parameter in others if parameter.kind in _BY_NAME]
        self._first = parameters[0].name if parameters else ""
        self._names = {parameter.name: parameter.default is inspect.Parameter.empty for parameter in named}
        self._takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in others)

        try:
            inspect.signature(self._function).bind(None, **dict.fromkeys(self._names))
        except TypeError as error:
            raise UserError(f"{_RULE}, got {shown_name(section.function)} with {one_line(error)}.") from error

    def check(self, task: Task) -> None:
        """Raise UserError if the task lacks a column that the function requires."""
        missing = next((name for name, needed in self._names.items() if needed and name not in task.payload), None)
        if missing is None:
            return
        advice = suggest(missing, task.payload) if task.payload else "The task has no payload."
        raise UserError(f"{_RULE}, got {shown_name(self.section.function)} with {missing!r}, which is none. {advice}")

    def call_of(self, episode: Episode) -> Callable[[], Any]:
        """Bind the function to all its arguments."""
        columns = episode.task.payload.items()
        given = {name: value for name, value in columns if name in self._names or self._takes_all}
        given.pop(self._first, None)
        return partial(self._function, episode, **given)


@dataclass
class Scores:
    """The rewards of some episodes, in the episodes' order."""

    totals: list[float]
    """The weighted sum of all parts; NaN where a part is unknown because the engine or a reward function failed."""
    episodes: list[Episode]
    """The episodes, with the score of the environment or of the function in its place."""
    problems: dict[int, str] = field(default_factory=dict)
    """Why a reward function gave no reward, by the episode's position."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Means of the unweighted parts over episodes with a known reward; empty if there is one part alone."""


class RewardScorer:
    """Scores episodes by the configured rewards; equal episodes get equal scores if the functions are deterministic."""

    def __init__(self, section: RewardSection, *, judges: bool = False) -> None:
        """`judges`: the first function takes the environment's place. Raises UserError for an unfit function."""
        self._section, self._judges = section, judges
        self._functions = [RewardFunction(row) for row in section.functions]
        self._tried: set[bool] = set()

    def check(self, task: Task) -> None:
        """Raise UserError if a function requires a column that the task lacks."""
        for function in self._functions:
            function.check(task)

    def judge(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Give episodes their score: the environment's, or the first function's where it judges; NaN if it failed."""
        return run_coroutine(self.judge_beside(episodes)) if self._judges else list(episodes)

    async def judge_beside(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Do the work of `judge` on a running event loop."""
        if not self._judges:
            return list(episodes)
        values = iter(await self._values(self._functions[0], [episode for episode in episodes if not episode.failed]))
        return [episode if episode.failed else _scored_by(episode, next(values)) for episode in episodes]

    async def try_on(self, episode: Episode, *, judges: bool) -> None:
        """Call the functions, or the judge alone, for the first episode, so that a mistake stops the run early."""
        if judges not in self._tried and not episode.failed:
            self._tried.add(judges)
            for function in self._functions[: int(self._judges)] if judges else self._functions:
                await self._values(function, [episode])

    @property
    def can_fail(self) -> bool:
        """True if an episode without a reward is left out and does not stop the run."""
        return bool(self._functions) and self._section.on_error == "drop"

    def score(self, episodes: Sequence[Episode]) -> Scores:
        """Score episodes. Raises UserError if a reward function fails, unless `reward.on_error` is drop."""
        return run_coroutine(self.score_beside(episodes))

    async def score_beside(self, episodes: Sequence[Episode]) -> Scores:
        """Do the work of `score` on a running event loop."""
        section = self._section
        places = [place for place, episode in enumerate(episodes) if not episode.failed]
        played = [episodes[place] for place in places]
        given = [await self._values(function, played) for function in self._functions]
        scores = Scores([math.nan] * len(episodes), list(episodes))
        own = ("environment", section.environment, [episode.environment_reward for episode in played])
        columns = [] if self._judges else [own]
        for function, values in zip(self._functions, given, strict=True):
            for place, value in zip(places, values, strict=True):
                if not isinstance(value, float):
                    scores.problems[place] = str(value)
                if isinstance(value, NotJudged) or (self._judges and values is given[0]):
                    scores.episodes[place] = _scored_by(scores.episodes[place], value)
            numbers = [value if isinstance(value, float) else math.nan for value in values]
            columns.append((function.section.name, function.section.weight, numbers))
        totals = [math.fsum(weight * values[i] for _, weight, values in columns) for i in range(len(played))]
        for place, total in zip(places, totals, strict=True):
            scores.totals[place] = total
        known = [i for i, total in enumerate(totals) if not math.isnan(total)]
        if known and len(columns) > 1:
            scores.metrics = {f"reward/{name}": statistics.fmean(v[i] for i in known) for name, _, v in columns}
        return scores

    async def _values(self, function: RewardFunction, episodes: Sequence[Episode]) -> list[Value]:
        """Call a function for each episode; a text explains a missing number where the episode is to be dropped."""
        places, thread = asyncio.Semaphore(self._section.parallel if function.waits else 1), WorkerThreads(1)

        async def answer(episode: Episode) -> Any:
            async with places:
                try:
                    call, limit = function.call_of(episode), self._section.timeout_s
                    return await thread.ask(call, timeout_s=limit, setting="reward.timeout_s")
                except (NotJudged, UserCodeFailed, UserError) as failed:  # raised or counted by `_value`
                    return failed

        try:
            answers = await asyncio.gather(*map(answer, episodes))
        finally:
            thread.close()
        return [self._value(function.section, a, episode) for a, episode in zip(answers, episodes, strict=True)]

    def _value(self, row: RewardFunctionSection, answer: Any, episode: Episode) -> Value:
        if isinstance(answer, NotJudged):
            return answer
        failed = isinstance(answer, BaseException)
        if not failed and math.isfinite(number := number_of(answer)):
            return number
        problem = str(answer) if failed else repr(answer)[:80]
        if self._section.on_error == "drop":
            return f"{problem} from {shown_name(row.function)}"
        ended = (
            ""
            if episode.stop_reason == StopReason.ANSWERED
            else f"; it ended without an answer ({episode.stop_reason})"
        )
        raise UserError(
            f"reward.functions must return a finite number for every episode, got {problem} from "
            f"{shown_name(row.function)} for {quoted_task(episode.task, episode.messages)}{ended}. "
            "Mend it; raise agentloop.NotJudged for an episode to leave out; or set reward.on_error: drop."
        ) from (answer if failed else None)


def open_scorer(config: RunConfig, environments: RunEnvironments) -> RewardScorer:
    """Make the scorer of the configured rewards. Raises UserError for functions that do not fit the tasks."""
    section = config.parts[0].environment
    judges = section.is_rows or (section.agent is not None and bool(config.reward.functions))
    scorer = RewardScorer(config.reward, judges=judges)
    for example in (one.example for one in environments.all if one.example is not None):
        scorer.check(example)
    return scorer


def _scored_by(episode: Episode, value: Value) -> Episode:
    """Replace all rewards of the episode by a function's value, or by NaN if the function gave none."""
    if isinstance(value, NotJudged):
        episode = replace(episode, stop_reason=StopReason.NOT_JUDGED, problem=shortened(str(value)))
    reward = value if isinstance(value, float) else math.nan
    return replace(episode, environment_reward=reward, agent_rewards={})


def number_of(answer: Any) -> float:
    """Convert a number of Python, NumPy or torch to a float; any other value, even text, gives NaN."""
    if isinstance(answer, (str, bytes, bytearray)):
        return math.nan
    try:
        with users_code():
            return float(answer)
    except (UserCodeFailed, UserError):
        return math.nan
