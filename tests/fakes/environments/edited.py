"""Tasks that open with what a person would have said, as a run's configuration registers them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentloop import Environment, Task
from context import Message, ToolCall


class Edited(Environment):
    """A reply that was corrected by hand, a call that a planner made, and then the question."""

    def make_task(self, rng: random.Random) -> Task:
        number = rng.randrange(100, 1000)
        return Task(
            (
                Message("user", "What comes behind 7?"),
                Message("assistant", "Behind 7 comes 8.", author="human_edit"),
                Message("user", f"Look up {number}."),
                Message("assistant", "", author="subagent:planner", tool_calls=(ToolCall("lookup", {"key": "pearl"}),)),
                Message("tool", f"{number + 1}", name="lookup"),
                Message("assistant", "I have looked it up.", author="initialization"),
                Message("user", "A secret.", author="judge"),
                Message("user", f"What comes behind {number}?"),
            ),
            {"answer": str(number + 1)},
        )

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return float(len(messages[-1].content) % 2 == 0)
