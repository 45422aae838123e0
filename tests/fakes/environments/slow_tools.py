"""Environments whose tools are slow or never end."""

import asyncio
import random
import sqlite3
import threading
import time
from collections.abc import Sequence
from typing import Any

from agentloop.environments import Environment, Task, tool
from context import Message

MEETING = threading.Barrier(8)
"""Passed by eight calls at once, and by no fewer."""
ENDED = threading.Semaphore(0)
"""One for each episode that ended."""


class Slow(Environment):
    """Each tool waits for something."""

    def make_task(self, rng: random.Random) -> Task:
        return Task("Do something.", {"number": rng.randrange(1000)})

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        ENDED.release()
        return 1.0

    @tool
    def wait(self, seconds: float) -> str:
        """Wait."""
        time.sleep(seconds)
        return f"waited {seconds}"

    @tool
    async def pause(self, seconds: float) -> str:
        """Wait without a thread."""
        await asyncio.sleep(seconds)
        return f"paused {seconds}"

    @tool
    def meet(self) -> str:
        """Wait for seven others."""
        MEETING.wait(timeout=10)
        return "met"

    @tool
    def wait_for_an_end(self) -> str:
        """Wait until another episode has ended."""
        while ENDED.acquire(blocking=False):
            pass  # episodes that ended before
        return str(ENDED.acquire(timeout=5))

    @tool
    def never(self) -> str:
        """Never come back."""
        threading.Event().wait()
        return "came back"


class OneConnection(Slow):
    """An environment with a connection that no other thread may use."""

    one_thread = True

    def start(self, task: Task) -> None:
        self.connection: Any = sqlite3.connect(":memory:")
        self.connection.execute("create table seen (n int)")

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return float(self.connection.execute("select count(*) from seen").fetchone()[0])

    @tool
    def note(self, n: int) -> str:
        """Note a number."""
        self.connection.execute("insert into seen values (?)", (n,))
        return "noted"
