"""The common base of adapters to other libraries' environments, whose options decide which tool they offer."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from pydantic import TypeAdapter

from agentloop.environments.environment import Environment, Task
from agentloop.environments.tools.tool_schema import ToolSpec, with_tools
from context.messages import Message

OVER = "The episode is over. Answer to end it."
LARGEST_SEED = 2**31 - 1


class Adapter(Environment):
    """Each tool call is a step; the reward of an episode is the sum of its steps' rewards."""

    def __init__(self, goal: str) -> None:
        self.goal, self.total, self.over = goal, 0.0, False

    @classmethod
    def for_options(cls, options: Mapping[str, Any]) -> type[Self]:
        """Make the class with the tool that these options ask for. Raises UserError."""
        raise NotImplementedError

    def reset(self, asked: Any) -> str:
        """Begin an episode with the value in a task's payload, and return the first observation for the policy."""
        raise NotImplementedError

    def task_of(self, key: str, asked: Any) -> Task:
        """Make the task whose payload is {key: asked}; its episodes call `reset(asked)`."""
        try:
            shown = self.reset(asked)
        finally:
            self.close()
        return Task(f"{self.goal}\n\n{shown}".strip(), {key: asked})

    def start(self, task: Task) -> None:
        (asked,) = task.payload.values()
        self.reset(asked)

    def observed(self, text: str, reward: float | None, *, over: bool) -> str:
        self.total += reward or 0.0
        self.over = over
        return f"{text}\n{OVER}" if over else text

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return self.total


def with_tool(
    environment: type[Adapter],
    function: Callable[..., str],
    *,
    description: str,
    parameters: Mapping[str, Any],
    arguments: TypeAdapter[dict[str, Any]],
) -> type[Any]:
    """Make a class with one more tool, which is named after `function` and calls it with the environment first."""
    name = function.__name__
    schema = {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
    return with_tools(environment, {name: ToolSpec(name, schema, False, False, arguments, function)})


def as_text(value: Any) -> str:
    """Turn an observation into text: any value but text as JSON, arrays as lists."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays and numbers of NumPy
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)
