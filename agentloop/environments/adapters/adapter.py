"""What environments of other libraries have in common: their options say which tool they offer."""

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
    """The tool's calls are steps; the reward of an episode is the sum of what its steps gave."""

    def __init__(self, goal: str) -> None:
        self.goal, self.total, self.over = goal, 0.0, False

    @classmethod
    def for_options(cls, options: Mapping[str, Any]) -> type[Self]:
        """The class with the tool that these options offer. Raises UserError."""
        raise NotImplementedError

    def reset(self, asked: Any) -> str:
        """Begin an episode as a task's payload asks for it; what the policy is shown of it."""
        raise NotImplementedError

    def task_of(self, key: str, asked: Any) -> Task:
        """The task whose episode is reset by `asked`, which its payload has under this key, and nothing else."""
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
    """A class that differs in a tool, named as the `function`, which is called with the environment first."""
    name = function.__name__
    schema = {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
    return with_tools(environment, {name: ToolSpec(name, schema, False, False, arguments, function)})


def as_text(value: Any) -> str:
    """An observation that is no text, as JSON; arrays as lists."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays and numbers of NumPy
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)
