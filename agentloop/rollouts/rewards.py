"""The rewards of ended episodes: the environment's score, functions of one's own, its length."""

import asyncio
import inspect
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agentloop.config import RunConfig
from agentloop.config.sections.reward import OverlongSection, RewardFunctionSection, RewardSection
from agentloop.environments import RunEnvironments
from agentloop.environments.environment import Task, quoted_task
from agentloop.environments.tools.worker_threads import WorkerThreads, run_coroutine
from agentloop.errors import UserCodeFailed, UserError, one_line
from agentloop.rollouts.episodes.episode import Episode
from agentloop.user_code import load_function, users_code
from context.strategies import CONTEXT_FULL
from context.wording import suggest
from replay.records import StopReason

_CUT_SHORT = (StopReason.TRUNCATED, CONTEXT_FULL)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_LISTS = ("completions", "prompts", "completion_ids")
"""What TRL gives lists of, for many episodes at once."""
_RULE = "reward.functions must take one argument, the ended episode, and after it columns of the task by name"


class RewardFunction:
    """Called with an ended episode, and with those columns of its task's payload that it has parameters for."""

    def __init__(self, section: RewardFunctionSection) -> None:
        """Runs the file of the function; raises UserError for one that can't be called so."""
        self.section = section
        self._function: Callable[..., Any] = load_function(section.function, what="reward.functions")
        self.waits = inspect.iscoroutinefunction(self._function)
        parameters = list(inspect.signature(self._function).parameters.values())
        others = parameters[1:]
        named = [parameter for parameter in others if parameter.kind in _BY_NAME]
        self._first = parameters[0].name if parameters else ""
        self._names = {parameter.name: parameter.default is inspect.Parameter.empty for parameter in named}
        self._takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in others)
        lists = next((parameter.name for parameter in parameters if parameter.name in _LISTS), None)
        if lists is not None:
            raise UserError(
                f"{_RULE}, got {section.function} with {lists!r}, which TRL gives lists of. It is given one episode: "
                "write def NAME(episode, COLUMN)."
            )
        try:
            inspect.signature(self._function).bind(None, **dict.fromkeys(self._names))
        except TypeError as error:
            raise UserError(f"{_RULE}, got {section.function} with {one_line(error)}.") from error

    def check(self, task: Task) -> None:
        """Raises UserError where a task lacks a column that the function can't do without."""
        missing = next((name for name, needed in self._names.items() if needed and name not in task.payload), None)
        if missing is None:
            return
        advice = suggest(missing, task.payload) if task.payload else "The task has no payload."
        raise UserError(f"{_RULE}, got {self.section.function} with {missing!r}, which is none. {advice}")

    def call_of(self, episode: Episode) -> Callable[[], Any]:
        """The function with all its arguments."""
        columns = episode.task.payload.items()
        given = {name: value for name, value in columns if name in self._names or self._takes_all}
        given.pop(self._first, None)
        return partial(self._function, episode, **given)


@dataclass
class Scores:
    """Rewards of some episodes, in their order."""

    totals: list[float]
    """The weighted sum of all parts; NaN where a part is unknown: the engine or a reward function failed."""
    episodes: list[Episode]
    """Each with its score: the environment's own, or that of the function that stands in its place."""
    problems: dict[int, str] = field(default_factory=dict)
    """Why a reward function gave an episode none, by its position, in words."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Means of the unweighted parts over episodes whose reward is known; nothing for a part that is alone."""


class RewardScorer:
    """The configured rewards: the same episodes get the same scores, as far as the functions do."""

    def __init__(self, section: RewardSection, *, max_tokens: int, judges: bool = False) -> None:
        """`judges`: the first function stands in the environment's place. Raises UserError for what does not fit."""
        self._section, self._max_tokens, self._judges = section, max_tokens, judges
        self._functions = [RewardFunction(row) for row in section.functions]
        self._tried: set[bool] = set()

    def check(self, task: Task) -> None:
        """Raises UserError where a function asks for what such a task does not have."""
        for function in self._functions:
            function.check(task)

    def judge(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Episodes with their score: the environment's, which they have, or the first function's; NaN if it failed."""
        return run_coroutine(self.judge_beside(episodes)) if self._judges else list(episodes)

    async def judge_beside(self, episodes: Sequence[Episode]) -> list[Episode]:
        """What `judge` does, on an event loop that runs."""
        if not self._judges:
            return list(episodes)
        values = iter(await self._values(self._functions[0], [episode for episode in episodes if not episode.failed]))
        return [episode if episode.failed else _scored_by(episode, next(values)) for episode in episodes]

    async def try_on(self, episode: Episode, *, judges: bool) -> None:
        """Call the functions, or the one that `judges`, for a first episode: a mistake, a UserError, costs it alone."""
        if judges not in self._tried and not episode.failed:
            self._tried.add(judges)
            for function in self._functions[: int(self._judges)] if judges else self._functions:
                await self._values(function, [episode])

    @property
    def can_fail(self) -> bool:
        """True: an episode can be left out for want of a reward."""
        return bool(self._functions) and self._section.on_error == "drop"

    def score(self, episodes: Sequence[Episode]) -> Scores:
        """Raises UserError where a reward function fails, unless `reward.on_error` is drop."""
        return run_coroutine(self.score_beside(episodes)) if self._functions else self._scored(episodes, [])

    async def score_beside(self, episodes: Sequence[Episode]) -> Scores:
        """What `score` does, on an event loop that runs."""
        played = [episode for episode in episodes if not episode.failed]
        return self._scored(episodes, [await self._values(function, played) for function in self._functions])

    def _scored(self, episodes: Sequence[Episode], given: Sequence[Sequence[float | str]]) -> Scores:
        """`given`: what each function gave the episodes that did not fail."""
        section = self._section
        places = [place for place, episode in enumerate(episodes) if not episode.failed]
        played = [episodes[place] for place in places]
        scores = Scores([math.nan] * len(episodes), list(episodes))
        own = ("environment", section.environment, [episode.environment_reward for episode in played])
        columns = [] if self._judges else [own]
        for function, values in zip(self._functions, given, strict=True):
            scores.problems |= {at: value for at, value in zip(places, values, strict=True) if isinstance(value, str)}
            numbers = [math.nan if isinstance(value, str) else value for value in values]
            columns.append((function.section.name, function.section.weight, numbers))
        if self._judges:
            for place, value in zip(places, given[0], strict=True):
                scores.episodes[place] = _scored_by(episodes[place], value)
        if section.overlong.buffer is not None:
            costs = [overlong_cost(episode, section.overlong, max_tokens=self._max_tokens) for episode in played]
            columns.append(("overlong", 1.0, costs))
        totals = [math.fsum(weight * values[i] for _, weight, values in columns) for i in range(len(played))]
        for place, total in zip(places, totals, strict=True):
            scores.totals[place] = total
        known = [i for i, total in enumerate(totals) if not math.isnan(total)]
        if known and len(columns) > 1:
            scores.metrics = {f"reward/{name}": statistics.fmean(v[i] for i in known) for name, _, v in columns}
        return scores

    async def _values(self, function: RewardFunction, episodes: Sequence[Episode]) -> list[float | str]:
        """The number of each episode, or what is wrong where that is to cost the episode alone."""
        places, thread = asyncio.Semaphore(self._section.parallel if function.waits else 1), WorkerThreads(1)

        async def answer(episode: Episode) -> Any:
            async with places:
                try:
                    call, limit = function.call_of(episode), self._section.timeout_s
                    return await thread.ask(call, timeout_s=limit, setting="reward.timeout_s")
                except (UserCodeFailed, UserError) as failed:  # raised or counted by `_value`
                    return failed

        try:
            answers = await asyncio.gather(*map(answer, episodes))
        finally:
            thread.close()
        return [self._value(function.section, a, episode) for a, episode in zip(answers, episodes, strict=True)]

    def _value(self, row: RewardFunctionSection, answer: Any, episode: Episode) -> float | str:
        failed = isinstance(answer, BaseException)
        if not failed and math.isfinite(number := number_of(answer)):
            return number
        problem = str(answer) if failed else repr(answer)[:80]
        if self._section.on_error == "drop":
            return f"{problem} from {row.function}"
        raise UserError(
            f"reward.functions must return a finite number for every episode, got {problem} from {row.function} for "
            f"{quoted_task(episode.task, episode.messages)}. Mend it; or set reward.on_error: drop."
        ) from (answer if failed else None)


def overlong_cost(episode: Episode, section: OverlongSection, *, max_tokens: int) -> float:
    """-penalty x clip((tokens - (max_tokens - buffer)) / buffer, 0, 1), and -penalty for an episode a limit cut short.

    Soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476), of a whole training sequence in place of one
    response.
    """
    assert section.buffer is not None
    over = (episode.num_tokens - (max_tokens - section.buffer)) / section.buffer
    share = 1.0 if episode.stop_reason in _CUT_SHORT else min(max(over, 0.0), 1.0)
    return -section.penalty * share if share else 0.0


def open_scorer(config: RunConfig, environments: RunEnvironments) -> RewardScorer:
    """The configured rewards of episodes of this environment; raises UserError for functions that do not fit them."""
    section = config.parts[0].environment
    judges = section.is_rows or (section.agent is not None and bool(config.reward.functions))
    scorer = RewardScorer(config.reward, max_tokens=config.context.max_tokens, judges=judges)
    for example in (one.example for one in environments.all if one.example is not None):
        scorer.check(example)
    return scorer


def _scored_by(episode: Episode, value: float | str) -> Episode:
    """The episode with what a function gave in the place of all that was said before; NaN where it gave none."""
    return replace(episode, environment_reward=math.nan if isinstance(value, str) else value, agent_rewards={})


def number_of(answer: Any) -> float:
    """The answer as a float: a number of Python, NumPy or torch; NaN for anything else, text among it."""
    if isinstance(answer, (str, bytes, bytearray)):
        return math.nan
    try:
        with users_code():
            return float(answer)
    except (UserCodeFailed, UserError):
        return math.nan
