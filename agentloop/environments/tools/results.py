"""Turns the outcome of a tool call into the text that the policy sees: bounded, and valid for every encoder."""

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from agentloop.environments.environment import Observation
from agentloop.errors import UserCodeFailed, UserError, WrongObservation, one_line, one_line_with_place
from agentloop.user_code import users_code

RAISED = "raised"
NOT_TEXT = "not_text"
CRASHED = "crashed"
_UNSAFE = re.compile("[\x00\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


class ToolFailed(Exception):
    """A tool's server or library failed; the policy sees the text, cut as a result would be."""

    def __init__(self, text: str, *, kind: str = RAISED, problem: str | None = None) -> None:
        """For `problem` see `ToolResult`."""
        super().__init__(text)
        self.kind, self.problem = kind, problem


@dataclass(frozen=True)
class ToolResult:
    """The outcome of a tool call."""

    content: str
    """The text that the policy sees, free of NUL and lone surrogates."""
    error_kind: str | None = None
    """unknown_tool, bad_arguments, raised, timeout, crashed or not_text; None for a success."""
    problem: str | None = field(default=None, compare=False)
    """The failure for the tool's author, with the file and line that raised. The policy does not see it."""
    reward: float | None = None
    over: bool = False
    """For `reward` and `over` see `Observation`."""


def observe(call: Callable[[], Any], *, max_chars: int) -> ToolResult:
    """Call a tool and put its outcome into words: text as it is, any other value as JSON, an exception as an error.

    Raises NotJudged where the tool does. NUL and lone surrogates become U+FFFD.
    """
    try:
        with users_code():
            return _shown(call(), max_chars)
    except (UserCodeFailed, UserError) as failed:
        return _raised(failed, max_chars)


async def observe_awaited(call: Callable[[], Awaitable[Any]], *, max_chars: int) -> ToolResult:
    """Call an `async def` tool and put its outcome into words, as `observe` does."""
    try:
        with users_code():
            return _shown(await call(), max_chars)
    except (UserCodeFailed, UserError) as failed:
        return _raised(failed, max_chars)


def _raised(failed: Exception, max_chars: int) -> ToolResult:
    if isinstance(failed, WrongObservation):
        raise failed
    error = failed.__cause__ if isinstance(failed, UserCodeFailed) and failed.__cause__ is not None else failed
    if isinstance(error, ToolFailed):
        return failure(error.kind, _cut(str(error), max_chars), problem=error.problem)
    return failure(RAISED, one_line(error), problem=one_line_with_place(error))


def failure(kind: str, text: str, *, problem: str | None = None) -> ToolResult:
    """Make an observation that explains a failure; `problem` has the details for the tool's author."""
    return ToolResult(_UNSAFE.sub(_REPLACEMENT, json.dumps({"error": text}, ensure_ascii=False)), kind, problem or text)


def _shown(value: Any, max_chars: int) -> ToolResult:
    if isinstance(value, Observation):
        shown = _shown("" if value.content is None else value.content, max_chars)
        reward = None if value.reward is None else float(value.reward)
        return replace(shown, reward=reward, over=bool(value.over))  # NumPy's has no JSON form
    value = value.value if isinstance(value, Enum) else value
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        name = type(value).__name__
        return failure(NOT_TEXT, f"the tool returned {name}, which has no JSON form ({one_line(error)})")
    cut = _cut(text, max_chars)
    safe = _UNSAFE.sub(_REPLACEMENT, cut)
    if safe == cut:
        return ToolResult(safe)
    return ToolResult(safe, NOT_TEXT, "the tool returned text with NUL or lone surrogates")


def _cut(text: str, max_chars: int) -> str:
    left_out = len(text) - max_chars
    return text if left_out <= 0 else f"{text[:max_chars]}... [cut: {left_out} characters left out]"
