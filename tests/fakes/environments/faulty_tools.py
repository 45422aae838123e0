"""An environment with one tool per fault, and how tests call it."""

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any

from agentloop.config.sections.rollout import RolloutSection
from agentloop.environments import Environment, Task, ToolResult, call_tool, tool
from agentloop.environments.tools.tool_schema import tools_of
from agentloop.environments.tools.worker_threads import WorkerThreads, run_coroutine
from context.messages import Message, ToolCall

LIMITS = RolloutSection(tool_timeout_s=0.3, tool_output_chars=100)
PATIENT = RolloutSection(tool_timeout_s=60.0, tool_output_chars=1000)
"""Limits for tools that answer, with time for a busy machine."""


class Faulty(Environment):
    """One tool per fault."""

    calls = 0

    @tool
    def count(self) -> int:
        """Count the calls."""
        self.calls += 1
        return self.calls

    @tool
    def add(self, a: int, b: int = 2) -> int:
        """Add two numbers."""
        return a + b

    @tool
    def describe(self, items: list[float], flags: dict[str, bool], unit: str | None = None) -> str:
        """Describe values."""
        return f"{items} {flags} {unit}"

    @tool
    def anything(self, values: list) -> str:  # type: ignore[type-arg]  # a bare list is allowed
        """Take any values."""
        return "taken"

    @tool
    def give(self, kind: str) -> str:
        """Return something that is no text."""
        return GIFTS[kind]()  # type: ignore[no-any-return]

    @tool
    def fail(self, kind: str) -> str:
        """Raise something."""
        raise ERRORS[kind]()

    @tool
    def hang(self, kind: str) -> str:
        """Never come back."""
        HANGS[kind]()
        return "came back"


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _recurse() -> Any:
    return _recurse()


_OVER = threading.Event()
"""Set when the call is over: a hanging tool ends then, because its thread would slow down later tests."""


def _spin_catching() -> None:
    while not _OVER.is_set():
        with suppress(BaseException):
            while not _OVER.is_set():
                pass


_CYCLE: list[Any] = []
_CYCLE.append(_CYCLE)
GIFTS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: b"\xff\xfe",
    "nul": lambda: "a\0b",
    "surrogate in json": lambda: ["a\udfffb"],
    "set": lambda: {1},
    "nan": lambda: float("nan"),
    "cycle": lambda: _CYCLE,
    "long": lambda: "x" * 1000,
    "umlaut": lambda: {"grüße": None},
}
ERRORS: dict[str, Callable[[], BaseException]] = {
    "value": lambda: ValueError("bad\nvalue"),
    "empty": lambda: KeyError(),
    "exit": lambda: SystemExit(3),
    "unprintable": lambda: _Unprintable(),
    "long": lambda: ValueError("y" * 10_000),
    "surrogate": lambda: ValueError("\ud800"),
    "recursion": _recurse,
}
HANGS: dict[str, Callable[[], Any]] = {
    "sleep": lambda: time.sleep(60),
    "lock": lambda: threading.Event().wait(60),
    "spin, catching": _spin_catching,
}


def call(name: str, arguments: Any = None, *, limits: RolloutSection = LIMITS) -> ToolResult:
    return called(Faulty(), ToolCall(name, {} if arguments is None else arguments), limits)


def called(environment: Environment, call: ToolCall, limits: RolloutSection) -> ToolResult:
    """Call a tool of an environment outside of an episode."""

    async def one() -> ToolResult:
        with closing(WorkerThreads(1)) as threads:
            return await call_tool(environment, tools_of(type(environment)), call, limits=limits, threads=threads)

    _OVER.clear()
    try:
        return run_coroutine(one())
    finally:
        _OVER.set()


def ask(environment: Environment, tool: str, /, *, limits: RolloutSection = PATIENT, **arguments: Any) -> ToolResult:
    return called(environment, ToolCall(tool, arguments), limits)


def error(result: ToolResult) -> str:
    text = json.loads(result.content)["error"]
    assert isinstance(text, str)
    return text


class Graded(Faulty):
    """An environment that rewards any answer."""

    def make_task(self, rng: random.Random) -> Task:
        return Task("Do something.", {})

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return 1.0

    @tool
    def flood(self) -> str:
        """Return sixteen megabytes."""
        return "x" * (16 << 20)
