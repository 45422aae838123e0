"""Calls a tool for the policy. Whatever the tool or the policy does wrong becomes an observation."""

from __future__ import annotations

import math
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
from agentloop.environments.tools.schema import ToolSpec, tools_of
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
    try:
        arguments = _checked(spec, call.arguments)
    except _BadArgument as error:
        return failure(BAD_ARGUMENTS, str(error))
    run = partial(getattr(environment, spec.name), **arguments)
    shown = partial(observe, run, max_chars=limits.max_chars)
    try:
        if spec.isolated or threading.current_thread() is not threading.main_thread():
            return run_isolated(shown, timeout_s=limits.timeout_s, max_chars=limits.max_chars)
        return run_with_deadline(shown, timeout_s=limits.timeout_s)
    except ToolTimeout:
        return failure(TIMEOUT, f"{spec.name} took longer than {limits.timeout_s:g} s")


class _BadArgument(Exception):
    """Names the argument and says what it must be."""


def _checked(spec: ToolSpec, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise _BadArgument(f"arguments must be an object, got {type(given).__name__}")
    for name in given:
        if name not in spec.arguments:
            raise _BadArgument(f"{spec.name} has no argument {_short(name)}. {suggest(str(name), spec.arguments)}")
    for name in spec.required:
        if name not in given:
            raise _BadArgument(f"argument {name!r} is missing")
    checked = {}
    for name, value in given.items():
        try:
            checked[name] = spec.arguments[name].validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise _BadArgument(f"argument {name!r}: {first['msg']}") from None
        if _holds_infinity(value):
            raise _BadArgument(f"argument {name!r}: Input should hold finite numbers only")
    return checked


def _holds_infinity(value: Any) -> bool:
    """Whether a number in a JSON value is NaN or infinite. No recursion: the policy chooses the depth."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return True
        if isinstance(item, Mapping):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
    return False


def _short(name: object) -> str:
    text = str(name)
    return repr(text if len(text) <= _SHOWN_NAME else text[:_SHOWN_NAME] + "...")
