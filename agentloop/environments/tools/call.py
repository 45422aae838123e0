"""Calls a tool for the policy. Whatever the tool or the policy does wrong becomes an observation."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError

from agentloop.environments.environment import Environment
from agentloop.environments.tools.deadline import run_with_deadline
from agentloop.environments.tools.isolation import run_isolated
from agentloop.environments.tools.results import ToolResult, ToolTimeout, failure, observe
from agentloop.environments.tools.tool_schema import ToolSpec, tools_of
from context.messages import ToolCall
from context.wording import suggest

UNKNOWN_TOOL = "unknown_tool"
BAD_ARGUMENTS = "bad_arguments"
POLICY_ERRORS = frozenset({UNKNOWN_TOOL, BAD_ARGUMENTS})
"""Kinds of errors that are the policy's own; every other kind is the tool's."""
TIMEOUT = "timeout"
_SHOWN_NAME = 40


@dataclass(frozen=True)
class ToolLimits:
    timeout_s: float
    max_chars: int
    """Characters of a result that are shown; a marker says how many were left out."""


def call_tool(environment: Environment, call: ToolCall, limits: ToolLimits) -> ToolResult:
    """Check the arguments, run the tool under its deadline and put the outcome into words.

    Raises nothing that the tool or the policy did wrong; a Ctrl-C of the user still gets through. Outside of
    the main thread, where no timer can interrupt a tool, every tool runs isolated.
    """
    tools = tools_of(type(environment))
    spec = tools.get(call.name)
    if spec is None:
        return failure(UNKNOWN_TOOL, f"there is no tool {_short(call.name)}. {suggest(call.name, tools)}")
    given = dict(call.arguments) if isinstance(call.arguments, Mapping) else call.arguments
    try:
        arguments = spec.arguments.validate_python(given)
    except ValidationError as error:
        return failure(BAD_ARGUMENTS, _problem(spec, given, error))
    run = partial(getattr(environment, spec.name), **arguments)
    shown = partial(observe, run, max_chars=limits.max_chars)
    try:
        if spec.isolated or threading.current_thread() is not threading.main_thread():
            return run_isolated(shown, timeout_s=limits.timeout_s, max_chars=limits.max_chars)
        return run_with_deadline(shown, timeout_s=limits.timeout_s)
    except ToolTimeout:
        return failure(TIMEOUT, f"{spec.name} took longer than {limits.timeout_s:g} s")


def _problem(spec: ToolSpec, given: Any, error: ValidationError) -> str:
    """Names the argument and says what it must be."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # A name that is mistyped is also missing where it belongs; the mistyped one says more.
    first = min(found, key=lambda problem: problem["type"] != "extra_forbidden")
    name, kind = next(iter(first["loc"]), None), first["type"]
    if name is None:
        return f"arguments must be an object, got {type(given).__name__}"
    if kind == "extra_forbidden":
        return f"{spec.name} has no argument {_short(name)}. {suggest(str(name), spec.argument_names)}"
    return f"argument {name!r} is missing" if kind == "missing" else f"argument {name!r}: {first['msg']}"


def _short(name: object) -> str:
    text = str(name)
    return repr(text if len(text) <= _SHOWN_NAME else text[:_SHOWN_NAME] + "...")
