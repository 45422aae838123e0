"""Reward functions of the user's: what they take, and how they are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agentloop.config.sections.reward import RewardFunctionSection
from agentloop.environments import Task
from agentloop.errors import UserError, one_line
from agentloop.rollouts.episodes.episode import Episode
from agentloop.user_code import load_function
from context.wording import suggest

_RULE = "reward.functions must take one argument, the ended episode, and after it columns of the task by name"
_OF_LISTS = frozenset({"completions", "prompts", "completion_ids"})
"""What other libraries give lists of, for many episodes at once."""


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
        try:
            inspect.signature(self._function).bind(None, **dict.fromkeys(self._names))
        except TypeError as error:
            raise UserError(f"{_RULE}, got {section.function} with {one_line(error)}.") from error

    def check(self, task: Task) -> None:
        """Raises UserError where a task lacks a column that the function can't do without."""
        missing = next((name for name, needed in self._names.items() if needed and name not in task.payload), None)
        if missing is None:
            return
        advice = "It is given one episode, no lists: write def NAME(episode, COLUMN)."
        if missing not in _OF_LISTS:
            advice = suggest(missing, task.payload) if task.payload else "The task has no payload."
        raise UserError(f"{_RULE}, got {self.section.function} with {missing!r}, which is none. {advice}")

    def call_of(self, episode: Episode) -> Callable[[], Any]:
        """The function with all its arguments."""
        return partial(self._function, episode, **self._columns(episode.task.payload))

    def _columns(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        if self._takes_all:
            return {name: value for name, value in payload.items() if name != self._first}
        return {name: payload[name] for name in self._names if name in payload}


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
