"""An environment whose failed episodes have often solved another task: replies of a wanted length."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentloop import Achieved, Environment, Task, tool
from context import Message


class Remainder(Environment):
    """The answer's length must leave a wanted remainder."""

    def make_task(self, rng: random.Random) -> Task:
        return _task(rng.randrange(5), rng.randrange(10**6))

    @tool
    def count(self, text: str) -> int:
        """Count the characters of a text."""
        return len(text)

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return float(len(messages[-1].content) % 5 == task.payload["rest"])

    def achieved(self, task: Task, messages: Sequence[Message]) -> Sequence[Achieved]:
        """The remainder that it does leave, by the answer alone."""
        other = _task(len(messages[-1].content) % 5, task.payload["number"])
        return (Achieved(other, first_turn=sum(message.author == "llm" for message in messages) - 1),)


class Boastful(Remainder):
    """It says that all was solved that there is, which its reward does not confirm."""

    def achieved(self, task: Task, messages: Sequence[Message]) -> Sequence[Achieved]:
        return [Achieved(_task(rest, task.payload["number"]), first_turn=0) for rest in range(5)]


class Confused(Remainder):
    """What it names is no reply."""

    def achieved(self, task: Task, messages: Sequence[Message]) -> Sequence[Achieved]:
        return [Achieved(task, first_turn=9)]


def _task(rest: int, number: int) -> Task:
    return Task(f"Say something, number {number}, of length {rest} modulo 5.", {"rest": rest, "number": number})
