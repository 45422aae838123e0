"""An environment that a model with random weights can earn something in: replies of even length."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentloop import Environment, Task, tool
from context import Message


class Parity(Environment):
    def make_task(self, rng: random.Random) -> Task:
        return Task(f"Say something of even length, number {rng.randrange(10**6)}.", {"number": rng.randrange(10**6)})

    @tool
    def count(self, text: str) -> int:
        """Count the characters of a text."""
        return len(text)

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return float(len(messages[-1].content) % 2 == 0)


class NotANumber(Parity):
    """Goes wrong only once it is under way."""

    asked = 0

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        type(self).asked += 1
        return float("nan") if type(self).asked > 40 else super().reward(task, messages)
