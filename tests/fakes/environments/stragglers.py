"""Tools that take much longer now and then, never end, or end their process; and a parser that finds calls of them."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import zlib

from agentloop import Task, tool
from context import HermesParser, Message, Reply, ToolCall
from tests.fakes.environments.parity import Parity

SHORT_S, LONG_S = 0.02, 0.6
ONE_IN = 20


class Calling:
    """A parser that finds a call of `look` in two of three replies, so that random weights call tools, too."""

    def parse(self, text: str, *, stopped: bool) -> Reply:
        reply = HermesParser().parse(text, stopped=stopped)
        if reply.outcome != "final" or zlib.crc32(text.encode()) % 3 == 0:
            return reply
        return Reply("tool_calls", Message("assistant", text, tool_calls=(ToolCall("look", {"text": text}),)), None)


class Stragglers(Parity):
    """One call in twenty takes thirty times as long: which one, a hash says, whatever the length of anything."""

    def start(self, task: Task) -> None:
        self.number = task.payload["number"]

    @tool
    def look(self, text: str) -> str:
        """Look at a text."""
        is_slow = zlib.crc32(f"{self.number} {text}".encode()) % ONE_IN == 0
        time.sleep(LONG_S if is_slow else SHORT_S)
        return "seen late" if is_slow else "seen"


class Deadly(Parity):
    """Tasks by their kind: 5 ends the process of its episode, a call of 1 never ends, 2 never starts; others do."""

    def make_task(self, rng: random.Random) -> Task:
        task = super().make_task(rng)
        return Task(task.prompt, {**task.payload, "kind": rng.randrange(10)})

    def start(self, task: Task) -> None:
        self.kind = task.payload["kind"]
        if threading.current_thread() is threading.main_thread():
            return  # it is only looked at, before any episode
        if self.kind == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == 2:
            threading.Event().wait()

    @tool
    def look(self, text: str) -> str:
        """Look at a text."""
        if self.kind == 1:
            threading.Event().wait()
        return "seen"
