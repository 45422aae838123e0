"""Environments that declare their tools deterministic, and write down every call that is run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from agentloop import Environment, Task, tool
from context import Message

RUNS: list[str] = []
_NUMBERS = itertools.count()


class Pure(Environment):
    """Answers follow from the arguments."""

    def make_task(self, rng: random.Random) -> Task:
        return Task("Do something.", {"number": rng.randrange(1000)})

    def start(self, task: Task) -> None:
        self.number = task.payload["number"]

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return 1.0

    @tool(deterministic=True)
    def square(self, n: int) -> int:
        """Square a number."""
        RUNS.append(f"square {n}")
        return n * n

    @tool
    def draw(self) -> int:
        """Draw a number."""
        RUNS.append("draw")
        return next(_NUMBERS)


class Sums(Pure):
    """Answers follow from all calls before; one of them fails."""

    deterministic = True

    def start(self, task: Task) -> None:
        self.total = 0

    @tool
    def add(self, n: int) -> int:
        """Add to the total."""
        RUNS.append(f"add {n}")
        self.total += n
        return self.total

    @tool
    def fail(self) -> int:
        """Never answers."""
        RUNS.append("fail")
        self.total += 100
        raise RuntimeError("no")
