"""The common base of adapters to other libraries' environments: an action is a call of their one tool, or a reply."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentloop.environments.environment import Environment, Task
from agentloop.environments.tools.results import CRASHED, ToolFailed
from agentloop.environments.tools.tool_schema import tools_of
from agentloop.errors import NotJudged
from context.messages import Message

LARGEST_SEED = 2**31 - 1
WHAT_IT_DOES = "Act, and see what follows."


class Adapter(Environment):
    """Each action is a step of the other environment, which rewards the reply and says when the episode is over."""

    version = "2"
    goal = ""
    """The text that opens the prompt."""
    plain_text = False
    """True: a reply is an action, and there is no tool."""
    part = "action"
    """Name of the tool's argument that a reply stands for."""

    def reset(self, asked: Any) -> str:
        """Begin an episode with the value in a task's payload, and return the first observation for the policy."""
        raise NotImplementedError

    def task_of(self, key: str, asked: Any) -> Task:
        """Make the task whose payload is {key: asked}; its episodes call `reset(asked)`."""
        try:
            return Task(f"{self.goal}\n\n{self.reset(asked)}".strip(), {key: asked})
        finally:
            self.close()

    def start(self, task: Task) -> None:
        (asked,) = task.payload.values()
        self.reset(asked)

    def offered(self, name: str, parameters: Mapping[str, Any], description: str) -> list[str | Mapping[str, Any]]:
        """Return what `tools_for` does: tools of MCP servers, and the tool whose calls are actions, if there is one."""
        function = {"name": name, "description": " ".join(description.split()), "parameters": parameters}
        return [*tools_of(type(self)), *([] if self.plain_text else [{"type": "function", "function": function}])]

    def respond(self, task: Task, messages: Sequence[Message]) -> Any:
        if not self.plain_text:
            return None
        try:
            return self.call_tool("", {self.part: messages[-1].content.strip()})
        except ToolFailed as error:
            if error.kind == CRASHED:
                raise NotJudged(str(error.problem or error)) from error
            return str(error)


def as_text(value: Any) -> str:
    """Turn an observation into text: any value but text as JSON, arrays as lists."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays and numbers of NumPy
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)
