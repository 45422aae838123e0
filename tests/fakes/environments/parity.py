"""Environments in which a model with random weights earns rewards: for replies of even length, or of a wanted one."""

import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentloop import Achieved, Environment, Task, tool
from context import HermesParser, Message, Reply, ToolCall


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
    """Each reply also has a reward of its own."""

    def turn_rewards(self, task: Task, messages: Sequence[Message]) -> Sequence[float]:
        return [float(len(message.content) % 3 == 0) for message in messages if message.author == "llm"]


class NotANumber(Parity):
    """Gives NaN as a reward after some episodes."""

    asked = 0

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        type(self).asked += 1
        return float("nan") if type(self).asked > 40 else super().reward(task, messages)


class Moody(Parity):
    """Parity with the fault that AGENTLOOP_TEST_MOOD names.

    `slow`: a reward takes a tenth of a second. `nan` and `raise`: after some episodes the reward is NaN or raises.
    `stuck`: after some episodes `start` raises. Where workers run it, `poison`: one task in four ends its process;
    `unstarted`: `start` always raises; `endless`: `start` never returns.
    """

    asked = 0

    def start(self, task: Task) -> None:
        mood = os.environ.get("AGENTLOOP_TEST_MOOD")
        if mood == "stuck" and type(self).asked > 20:
            raise ConnectionError("no\nanswer")
        if threading.current_thread() is threading.main_thread():
            return  # the check before a run
        if mood == "poison" and task.payload["number"] % 4 == 0:
            os._exit(9)
        if mood == "unstarted":
            raise ConnectionError("no answer")
        if mood == "endless":
            threading.Event().wait()

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        mood = os.environ.get("AGENTLOOP_TEST_MOOD")
        type(self).asked += 1
        if mood == "slow":
            time.sleep(0.1)
        if mood == "raise" and type(self).asked > 40:
            raise ConnectionError("no\nanswer")
        return float("nan") if mood == "nan" and type(self).asked > 40 else super().reward(task, messages)


class Remainder(Parity):
    """The answer's length modulo 5 must be the wanted remainder."""

    def make_task(self, rng: random.Random) -> Task:
        return _remainder(rng.randrange(5), rng.randrange(10**6))

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return float(len(messages[-1].content) % 5 == task.payload["rest"])

    def achieved(self, task: Task, messages: Sequence[Message]) -> Sequence[Achieved]:
        """The task of the remainder that the answer has."""
        other = _remainder(len(messages[-1].content) % 5, task.payload["number"])
        return (Achieved(other, first_turn=sum(message.author == "llm" for message in messages) - 1),)


class Boastful(Remainder):
    """Claims that every remainder was solved, which its reward does not confirm."""

    def achieved(self, task: Task, messages: Sequence[Message]) -> Sequence[Achieved]:
        return [Achieved(_remainder(rest, task.payload["number"]), first_turn=0) for rest in range(5)]


class Confused(Remainder):
    """Claims a first turn that does not exist."""

    def achieved(self, task: Task, messages: Sequence[Message]) -> Sequence[Achieved]:
        return [Achieved(task, first_turn=9)]


def _remainder(rest: int, number: int) -> Task:
    return Task(f"Say something, number {number}, of length {rest} modulo 5.", {"rest": rest, "number": number})


class Edited(Parity):
    """Opens with a reply that was edited by hand and a planner's call, and then asks the question."""

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


def unlucky(episode: Any) -> float:
    """A reward function that fails for some replies."""
    if len(episode.messages[-1].content) % 2:
        raise LookupError("no reward for this one")
    return 1.0


class Pondering:
    """A parser that finds a thought and no answer in every reply."""

    def parse(self, text: str, *, stopped: bool) -> Reply:
        reply = HermesParser().parse(text, stopped=stopped)
        if reply.outcome != "final":
            return reply
        return Reply("malformed", replace(reply.message, reasoning="hm"), "think again")


class Repeatable(Parity):
    """Equal calls have equal answers."""

    deterministic = True
