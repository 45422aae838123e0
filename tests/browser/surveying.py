"""An environment and a parser that give a model with random weights something to show: tool calls, errors, rewards."""

import random
from collections.abc import Sequence

from agentloop.environments.environment import Environment, Task, tool
from context import HermesParser, Message, Reply, ToolCall


class Surveying(Environment):
    """Few tasks, so that each is tried again; a reply earns by its length."""

    def make_task(self, rng: random.Random) -> Task:
        plot = rng.randrange(12)
        return Task(f"Measure the fence of plot {plot} and say how long it is.", {"plot": plot})

    @tool
    def measure(self, text: str) -> dict[str, int]:
        """Measure a stretch of fence."""
        if len(text) % 7 == 0:
            raise ValueError("the tape is too short")
        return {"metres": len(text), "posts": 1 + len(text) // 3}

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return (len(messages[-1].content) + int(task.payload["plot"])) % 5 / 4


class Eager:
    """Reads a tool call into one reply of two, and a thought into some."""

    def parse(self, text: str, *, stopped: bool) -> Reply:
        read = HermesParser().parse(text, stopped=stopped)
        if read.outcome in ("truncated", "tool_calls"):
            return read
        thought = "One more stretch, then I know." if len(text) % 3 == 0 else None
        if len(text) % 2:
            return Reply("final", Message("assistant", text, "llm", reasoning=thought), None)
        call = ToolCall("measure", {"text": text[:24]}, f"call-{len(text)}")
        return Reply("tool_calls", Message("assistant", "", "llm", tool_calls=(call,), reasoning=thought), None)
