"""Environments that count their starts and closes, or note every call that is run."""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from agentloop import Achieved, Environment, NotJudged, Task, tool
from context.messages import Message


class Holding(Environment):
    """The payload names the method that goes wrong: start, the tool, reward or close."""

    counts: ClassVar[Counter[str]] = Counter()

    def make_task(self, rng: random.Random) -> Task:
        return Task("Say something.", {"fault": ""})

    def start(self, task: Task) -> None:
        self.counts["started"] += 1
        self.fault = task.payload["fault"]
        if self.fault == "late start":
            time.sleep(0.1)
        self.closed = False
        if self.fault == "start":
            raise ConnectionError("no answer")

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        self.counts["closed"] += 1
        if self.fault == "close":
            raise OSError("would not go")
        if self.fault == "unjudged close":
            raise NotJudged("nobody is there")
        if self.fault == "slow close":
            time.sleep(3)

    @tool
    def act(self) -> str:
        """Act."""

        if self.fault == "hang":
            time.sleep(3)
        return "done"

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        if self.fault == "reward" and messages[-1].content:
            raise KeyError("answer")
        return float(messages[-1].content == "done")

    def achieved(self, task: Task, messages: Sequence[Message]) -> Sequence[Achieved]:
        return ()

    def demonstrate(self, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
        return Message("assistant", "done")


class AsyncHolding(Holding):
    """Starts and closes on the event loop."""

    async def start(self, task: Task) -> None:  # type: ignore[override]  # a plain one may become an async one
        super().start(task)

    async def close(self) -> None:  # type: ignore[override]
        if self.fault == "slow close":
            self.counts["closed"] += 1
            await asyncio.sleep(3)
        super().close()


class Unclosable(Holding):
    """Fails at every close, even in the check before a run."""

    def close(self) -> None:
        raise OSError("would not go")


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
