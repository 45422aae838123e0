"""An environment that a model with random weights can earn something in: replies of even length."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentloop import Environment, Task, tool
from context import HermesParser, Message, Reply


class Parity(Environment):
    def make_task(self, rng: random.Random) -> Task:
        return Task(f"Say something of even length, number {rng.randrange(10**6)}.", {"number": rng.randrange(10**6)})

    @tool
    def count(self, text: str) -> int:
        """Count the characters of a text."""
        return len(text)

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return float(len(messages[-1].content) % 2 == 0)


class RowParity(Environment):
    """Tasks are rows; one in four can't be solved."""

    def task_from_row(self, row: Mapping[str, Any]) -> Task:
        return Task(f"Say something of even length, number {row['number']}.", {"possible": row["number"] % 4 != 0})

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return float(task.payload["possible"] and len(messages[-1].content) % 2 == 0)


class ByTurn(Parity):
    """Every reply earns by itself, too."""

    def turn_rewards(self, task: Task, messages: Sequence[Message]) -> Sequence[float]:
        return [float(len(message.content) % 3 == 0) for message in messages if message.author == "llm"]


class NotANumber(Parity):
    """Goes wrong only once it is under way."""

    asked = 0

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        type(self).asked += 1
        return float("nan") if type(self).asked > 40 else super().reward(task, messages)


class Moody(Parity):
    """Its author has bad days; AGENTLOOP_TEST_MOOD says which.

    `slow`: a reward takes a tenth of a second. `nan`, `raise`: it is no number, or none at all, once the run is
    under way. `stuck`: an episode does not start, then. Else as Parity.
    """

    asked = 0

    def start(self, task: Task) -> None:
        if os.environ.get("AGENTLOOP_TEST_MOOD") == "stuck" and type(self).asked > 20:
            raise ConnectionError("no\nanswer")

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        mood = os.environ.get("AGENTLOOP_TEST_MOOD")
        type(self).asked += 1
        if mood == "slow":
            time.sleep(0.1)
        if mood == "raise" and type(self).asked > 40:
            raise ConnectionError("no\nanswer")
        return float("nan") if mood == "nan" and type(self).asked > 40 else super().reward(task, messages)


class Pondering:
    """A parser that finds a thought in every reply, and no answer in any."""

    def parse(self, text: str, *, stopped: bool) -> Reply:
        reply = HermesParser().parse(text, stopped=stopped)
        if reply.outcome != "final":
            return reply
        return Reply("malformed", replace(reply.message, reasoning="hm"), "think again")
