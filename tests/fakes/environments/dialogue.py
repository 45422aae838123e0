"""An environment that says what its task's payload has written down: to calls, to plain replies, and at its end."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from agentloop import Environment, Message, Observation, Task, tool


class Dialogue(Environment):
    """`payload.steps` are its answers in order, each {say, reward, over}; a step without `say` ends it, or answers."""

    def make_task(self, rng: random.Random) -> Task:
        return Task("Begin.", {"steps": [], "tools": None})

    def tools_for(self, task: Task) -> Any:
        return task.payload["tools"]

    def start(self, task: Task) -> None:
        self._steps = iter(task.payload["steps"])
        self.asked: list[str] = []

    @tool
    def look(self, at: str) -> str | Observation:
        """Look at something.

        Args:
            at: the thing
        """
        self.asked.append(at)
        return self._next("tool")

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        self.asked.append(f"{name} {sorted(arguments.items())}")
        return self._next("tool")

    async def respond(self, task: Task, messages: Sequence[Message]) -> Any:
        assert messages[-1].role == "assistant" and not messages[-1].tool_calls
        return self._next("user")

    def _next(self, role: str) -> Any:
        step: Mapping[str, Any] = next(self._steps, {"say": "More.", "reward": None, "over": False})
        said, reward, over = step["say"], step["reward"], step["over"]
        if role == "user":
            if said is None and not over:
                return None
            if isinstance(said, list):
                said = [Message("user", text, author="env") for text in said]
        elif isinstance(said, list) or said is None:
            said = None if over else "Nothing."
        return said if reward is None and not over and said is not None else Observation(said, reward, over)


class Judged(Dialogue):
    """Rewards the ends that it is asked about by their name's length and by what it was asked."""

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        assert self.stop_reason is not None
        return len(self.stop_reason) + len(messages) / 100


class JudgedAtEveryEnd(Judged):
    rewards_every_end = True
