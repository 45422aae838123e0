"""What the policy is shown of a tool call: bounded text that every encoder can take."""

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from agentloop.errors import UserCodeFailed, UserError, one_line, one_line_with_place
from agentloop.user_code import users_code

RAISED = "raised"
NOT_TEXT = "not_text"
CRASHED = "crashed"
_UNSAFE = re.compile("[\x00\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


class ToolFailed(Exception):
    """What a tool has to say that failed elsewhere: the policy is shown the text, as long as a result may be."""

    def __init__(self, text: str, *, kind: str = RAISED, problem: str | None = None) -> None:
        """`problem`: see `ToolResult`."""
        super().__init__(text)
        self.kind, self.problem = kind, problem


@dataclass(frozen=True)
class ToolResult:
    content: str
    """Shown to the policy. Free of NUL and lone surrogates."""
    error_kind: str | None = None
    """unknown_tool, bad_arguments, raised, timeout, crashed, not_text; None when all went well."""
    problem: str | None = field(default=None, compare=False)
    """What failed, for the tool's author: with the file and line that raised. The policy is not shown it."""


def observe(call: Callable[[], Any], *, max_chars: int) -> ToolResult:
    """What a tool returns, text as it is and anything else as JSON, or raises; NUL and surrogates become U+FFFD."""
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
    error = failed.__cause__ if isinstance(failed, UserCodeFailed) and failed.__cause__ is not None else failed
    if isinstance(error, ToolFailed):
        return failure(error.kind, _cut(str(error), max_chars), problem=error.problem)
    return failure(RAISED, one_line(error), problem=one_line_with_place(error))


def failure(kind: str, text: str, *, problem: str | None = None) -> ToolResult:
    """An observation that says what went wrong; `problem` says more to the tool's author."""
    return ToolResult(_UNSAFE.sub(_REPLACEMENT, json.dumps({"error": text}, ensure_ascii=False)), kind, problem or text)


def _shown(value: Any, max_chars: int) -> ToolResult:
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
