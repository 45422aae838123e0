"""The rewards of ended episodes: the environment's score, functions of one's own, a reward model, its length."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentloop.config import RunConfig
from agentloop.config.sections.reward import OverlongSection, RewardFunctionSection, RewardSection
from agentloop.environments import RunEnvironments
from agentloop.environments.environment import Task, quoted_task
from agentloop.environments.tools.worker_threads import WorkerThreads, run_coroutine
from agentloop.errors import UserCodeFailed, UserError
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.reward_functions import RewardFunction
from agentloop.user_code import users_code
from context.messages import Message
from context.strategies import CONTEXT_FULL
from replay.records import StopReason

_CUT_SHORT = (StopReason.TRUNCATED, CONTEXT_FULL)


RewardModel = Callable[[Sequence[Sequence[Message]]], list[float]]
"""Scores whole conversations."""


@dataclass
class Scores:
    """Rewards of some episodes, in their order."""

    totals: list[float]
    """The weighted sum of all parts; NaN where a part is unknown: the engine or a reward function failed."""
    episodes: list[Episode]
    """Each with its score: the environment's own, or that of the function that stands in its place."""
    parts: dict[str, list[float]] = field(default_factory=dict)
    """Unweighted, by name; one that is alone is not among them."""
    problems: dict[int, str] = field(default_factory=dict)
    """Why a reward function gave an episode none, by its position, in words."""

    def metrics(self) -> dict[str, float]:
        """Means of the parts over episodes whose reward is known."""
        known = [position for position, total in enumerate(self.totals) if not math.isnan(total)]
        if not known:
            return {}
        return {f"reward/{name}": statistics.fmean(part[p] for p in known) for name, part in self.parts.items()}


class RewardScorer:
    """The configured rewards. Has no state: the same episodes get the same scores, as far as the functions do."""

    def __init__(
        self, section: RewardSection, *, max_tokens: int, model: RewardModel | None = None, judges: bool = False
    ) -> None:
        """Runs the files of the user's functions; raises UserError for what does not fit.

        `judges`: the first function stands in the environment's place, which has no score.
        """
        self._section = section
        self._max_tokens = max_tokens
        self._model = model
        self._judges = judges
        self._functions = [RewardFunction(row) for row in section.functions]

    def check(self, task: Task) -> None:
        """Raises UserError where a function asks for what such a task does not have."""
        for function in self._functions:
            function.check(task)

    def judge(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Episodes with their score: the environment's, which they have, or the first function's; NaN if it failed."""
        return run_coroutine(self.judge_beside(episodes)) if self._judges else list(episodes)

    async def judge_beside(self, episodes: Sequence[Episode]) -> list[Episode]:
        """The same beside what else runs on an event loop."""
        if not self._judges:
            return list(episodes)
        ended = [episode for episode in episodes if not episode.failed]
        judge = self._functions[0]
        values = iter(self._values(judge, await self._answers(judge, ended), ended))
        return [episode if episode.failed else _scored_by(episode, next(values)) for episode in episodes]

    @property
    def can_fail(self) -> bool:
        """Whether an episode can be left out for want of a reward."""
        return bool(self._functions) and self._section.on_error == "drop"

    def score(self, episodes: Sequence[Episode]) -> Scores:
        """Raises UserError where a reward function fails, unless `reward.on_error` is drop."""
        return run_coroutine(self.score_beside(episodes)) if self._functions else self._scored(episodes, [])

    async def score_beside(self, episodes: Sequence[Episode]) -> Scores:
        """The same beside what else runs on an event loop."""
        ended = [episode for episode in episodes if not episode.failed]
        return self._scored(episodes, [await self._answers(function, ended) for function in self._functions])

    def _scored(self, episodes: Sequence[Episode], answers: Sequence[Sequence[Any]]) -> Scores:
        """`answers`: what each function returned or raised for the episodes that did not fail."""
        section = self._section
        played = [position for position, episode in enumerate(episodes) if not episode.failed]
        ended = [episodes[position] for position in played]
        scores = Scores([math.nan] * len(episodes), list(episodes))
        columns = []
        if not self._judges:
            columns.append(("environment", section.environment, [episode.environment_reward for episode in ended]))
        for function, given in zip(self._functions, answers, strict=True):
            found = self._values(function, given, ended)
            unknown = {at: value for at, value in zip(played, found, strict=True) if isinstance(value, str)}
            scores.problems |= unknown
            row = function.section
            columns.append((row.name, row.weight, [math.nan if isinstance(v, str) else v for v in found]))
            if self._judges and function is self._functions[0]:
                for position, value in zip(played, found, strict=True):
                    scores.episodes[position] = _scored_by(episodes[position], value)
        if self._model is not None:
            columns.append(("model", section.model.weight, self._model([episode.messages for episode in ended])))
        if section.overlong.buffer is not None:
            costs = [overlong_cost(episode, section.overlong, max_tokens=self._max_tokens) for episode in ended]
            columns.append(("overlong", 1.0, costs))
        for index, position in enumerate(played):
            scores.totals[position] = math.fsum(weight * values[index] for _, weight, values in columns)
        if len(columns) > 1:
            scores.parts = {name: _spread(values, played, len(episodes)) for name, _, values in columns}
        return scores

    async def _answers(self, function: RewardFunction, episodes: Sequence[Episode]) -> list[Any]:
        """What the function returned or raised. `async def` functions run side by side, others one after another."""
        places, thread = asyncio.Semaphore(self._section.parallel if function.waits else 1), WorkerThreads(1)

        async def one(episode: Episode) -> Any:
            async with places:
                try:
                    call, limit = function.call_of(episode), self._section.timeout_s
                    return await thread.ask(call, timeout_s=limit, setting="reward.timeout_s")
                except (UserCodeFailed, UserError) as failed:  # reported or counted by `_value`
                    return failed

        try:
            return list(await asyncio.gather(*(one(episode) for episode in episodes)))
        finally:
            thread.close()

    def _values(
        self, function: RewardFunction, answers: Sequence[Any], episodes: Sequence[Episode]
    ) -> list[float | str]:
        return [self._value(function.section, answer, e) for answer, e in zip(answers, episodes, strict=True)]

    def _value(self, row: RewardFunctionSection, answer: Any, episode: Episode) -> float | str:
        """The number, or what is wrong where that is to cost the episode alone."""
        if isinstance(answer, BaseException):
            problem = str(answer)
        elif math.isfinite(number := _number(answer)):
            return number
        else:
            problem = repr(answer)[:80]
        if self._section.on_error == "drop":
            return f"{problem} from {row.function}"
        raise UserError(
            f"reward.functions must return a finite number for every episode, got {problem} from {row.function} for "
            f"{quoted_task(episode.task, episode.messages)}. Mend it and --resume: this iteration is collected again; "
            "or set reward.on_error: drop."
        ) from (answer if isinstance(answer, BaseException) else None)


def overlong_cost(episode: Episode, section: OverlongSection, *, max_tokens: int) -> float:
    """-penalty x clip((tokens - (max_tokens - buffer)) / buffer, 0, 1), and -penalty for an episode a limit cut short.

    Soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476), of a whole training sequence in place of one
    response.
    """
    if section.buffer is None:
        return 0.0
    over = (episode.num_tokens - (max_tokens - section.buffer)) / section.buffer
    share = 1.0 if episode.stop_reason in _CUT_SHORT else min(max(over, 0.0), 1.0)
    return -section.penalty * share if share else 0.0


def open_scorer(config: RunConfig, environments: RunEnvironments, *, model: RewardModel | None = None) -> RewardScorer:
    """The configured rewards of episodes of this environment; raises UserError for functions that do not fit them."""
    scorer = RewardScorer(
        config.reward, max_tokens=config.context.max_tokens, model=model, judges=config.parts[0].environment.is_rows
    )
    for example in (one.example for one in environments.all if one.example is not None):
        scorer.check(example)
    return scorer


def _scored_by(episode: Episode, value: float | str) -> Episode:
    """With what a function gave in the place of the environment's score; NaN where it gave none."""
    return replace(episode, environment_reward=math.nan if isinstance(value, str) else value)


def _number(answer: Any) -> float:
    """As a float: numbers of Python, NumPy and torch; NaN for anything else, text among it."""
    if isinstance(answer, (str, bytes, bytearray)):
        return math.nan
    try:
        with users_code():
            return float(answer)
    except (UserCodeFailed, UserError):
        return math.nan


def _spread(values: Sequence[float], positions: Sequence[int], count: int) -> list[float]:
    spread = [math.nan] * count
    for position, value in zip(positions, values, strict=True):
        spread[position] = value
    return spread
