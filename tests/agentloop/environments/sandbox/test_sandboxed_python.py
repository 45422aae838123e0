"""An environment that derives from `SandboxedPython` has the tool `run_python`, and options for it."""

from __future__ import annotations

from typing import Any

from agentloop.environments import Environment, Task, ToolLimits, call_tool, load_environment
from agentloop.environments.sandbox import SandboxLimits
from agentloop.environments.tools.results import ToolResult
from agentloop.environments.tools.worker_threads import WorkerThreads, run_coroutine
from context.messages import Message, ToolCall
from tests.docs.blocks import ROOT

SQUARES = f"{ROOT}/examples/squares.py:Squares"


def made(**options: Any) -> Environment:
    return load_environment(SQUARES, options).create()


def called(environment: Environment, code: str) -> ToolResult:
    limits = ToolLimits(timeout_s=20.0, max_chars=1000)

    async def call() -> ToolResult:
        threads = WorkerThreads(1)
        try:
            return await call_tool(environment, ToolCall("run_python", {"code": code}), limits, threads)
        finally:
            threads.close()

    return run_coroutine(call())


def test_tool_shows_what_a_program_prints() -> None:
    assert called(made(), "print(3 ** 2)") == ToolResult("9")
    assert called(made(), "print(x)").content.endswith("NameError: name 'x' is not defined\n[exit code 1]")


def test_reward_may_run_the_reply() -> None:
    task = Task("Print the square of 3.", {"of": 3})
    replies = [Message("assistant", text, author="llm") for text in ("print(3 * 3)", "print(6)", "no program")]
    assert [made().reward(task, [reply]) for reply in replies] == [1.0, 0.0, 0.0]


def test_options_choose_sandbox_and_limits() -> None:
    factory = load_environment(SQUARES, {"sandbox": "none", "limits": {"seconds": 1, "output_bytes": 50}})
    assert factory.create().sandbox.limits == SandboxLimits(seconds=1, output_bytes=50)  # type: ignore[attr-defined]
    assert [tool["function"]["name"] for tool in factory.tools] == ["run_python"]
