"""Calls a tool for the policy. Every mistake of the tool or the policy becomes an observation."""

import asyncio
import inspect
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any

from pydantic import ValidationError

from agentloop.config.sections.rollout import RolloutSection
from agentloop.environments.environment import Environment
from agentloop.environments.tools.results import ToolResult, failure, observe, observe_awaited
from agentloop.environments.tools.tool_schema import SCHEMA_ERROR, ToolSpec
from agentloop.environments.tools.worker_threads import WorkerThreads, run_hook
from context.messages import ToolCall
from context.wording import excerpt, suggest

UNKNOWN_TOOL = "unknown_tool"
BAD_ARGUMENTS = "bad_arguments"
MALFORMED = "malformed"
POLICY_ERRORS = frozenset({UNKNOWN_TOOL, BAD_ARGUMENTS, MALFORMED})
"""Error kinds that are the policy's fault; every other kind is the tool's."""
TIMEOUT = "timeout"
Tools = Mapping[str, ToolSpec]
"""The tools that a task offers, by name."""
_SHOWN_NAME = 40


async def call_tool(
    environment: Environment, tools: Tools, call: ToolCall, *, limits: RolloutSection, threads: WorkerThreads
) -> ToolResult:
    """Call one of the `tools` within its deadline, and put the outcome into words, cut at `tool_output_chars`."""
    checked = _check_call(environment, tools, call)
    if isinstance(checked, ToolResult):
        return checked
    spec, run = checked
    try:
        if inspect.iscoroutinefunction(run.func):
            return await _within_time(observe_awaited(run, max_chars=limits.tool_output_chars), limits.tool_timeout_s)
        shown = partial(observe, run, max_chars=limits.tool_output_chars)
        return await threads.run(shown, timeout_s=limits.tool_timeout_s)
    except TimeoutError:
        return failure(TIMEOUT, f"{spec.name} took longer than {limits.tool_timeout_s:g} s")


def call_demonstrated(environment: Environment, tools: Tools, call: ToolCall, *, max_chars: int) -> ToolResult:
    """Make a call of the environment's own demonstrator in this thread, without a deadline."""
    checked = _check_call(environment, tools, call)
    if isinstance(checked, ToolResult):
        return checked
    _, run = checked
    return observe(partial(run_hook, run), max_chars=max_chars)


def _check_call(environment: Environment, tools: Tools, call: ToolCall) -> ToolResult | tuple[ToolSpec, partial[Any]]:
    """Return the tool and the tool bound to its arguments, or a result that explains the mistake in the call."""
    spec = tools.get(call.name)
    if spec is None:
        return failure(UNKNOWN_TOOL, f"there is no tool {_short(call.name)}. {suggest(call.name, tools)}")
    given = dict(call.arguments) if isinstance(call.arguments, Mapping) else call.arguments
    try:
        arguments = spec.arguments.validate_python(given)
    except ValidationError as error:
        return failure(BAD_ARGUMENTS, _problem(spec, given, error))
    return spec, partial(spec.function, environment, **arguments)


async def _within_time(coroutine: Coroutine[Any, Any, ToolResult], timeout_s: float) -> ToolResult:
    """Await a tool's coroutine. After `timeout_s` cancel it, do not wait, and raise TimeoutError."""
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait([task], timeout=timeout_s)
    finally:
        task.cancel()
    if not task.done():
        raise TimeoutError
    return task.result()


def _problem(spec: ToolSpec, given: Any, error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # A mistyped argument gives two errors: an unknown name and a missing one. The unknown name is more helpful.
    first = min(found, key=lambda problem: problem["type"] != "extra_forbidden")
    name, kind = next(iter(first["loc"]), None), first["type"] if len(first["loc"]) < 2 else None
    if kind == SCHEMA_ERROR:
        return first["msg"]
    if name is None:
        return f"arguments must be an object, got {type(given).__name__}"
    if kind == "extra_forbidden":
        known = spec.schema["function"]["parameters"]["properties"]
        return f"{spec.name} has no argument {_short(name)}. {suggest(str(name), known)}"
    return f"argument {name!r} is missing" if kind == "missing" else f"argument {name!r}: {first['msg']}"


def _short(name: object) -> str:
    return repr(excerpt(str(name), _SHOWN_NAME))
