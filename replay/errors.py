"""What the buffer refuses, by name. Each text is one line: the rule, what was found, what to do."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

_DEEP = "be nested less deep"
_RULES = {
    "model_type": "be an object",
    "dict_type": "be an object",
    "recursion_depth_exceeded": _DEEP,
    "recursion_loop": _DEEP,  # the same before pydantic 2.14: what is read from JSON has no loop
}
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shortened(value: object) -> str:
    """For messages: one short line, whatever the value."""
    return _SHORT.repr(value)


def first_problem(error: ValidationError) -> tuple[tuple[str | int, ...], str, str]:
    """Where it is, what it must do, and what was found, in short. What a row has and should not have comes before what
    it lacks: it may be the same, spelled otherwise."""
    found = error.errors(include_url=False)
    first = min(found, key=lambda problem: problem["type"] == "missing")
    (*within, name), kind = first["loc"] or ("",), first["type"]
    if kind == "missing":
        return tuple(within), f"hold {name!r}", "none"
    if kind == "extra_forbidden":
        return tuple(within), "hold known columns", shortened(name)
    rule = _RULES.get(kind) or first["msg"].partition(" should ")[2] or f"be valid ({first['msg']})"
    return first["loc"], rule, shortened(first["input"])


def sentence_for_validation_error(error: ValidationError, *within: str) -> str:
    """The first problem as `replay.fraction must be greater than or equal to 0, got -1.`, its place named from `within`
    on. A rule over several keys is a sentence already."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "extra_forbidden":
        return f"{'.'.join(map(str, (*within, *first['loc'])))} must be a known key, got an unknown one."
    place, rule, shown = first_problem(error)
    return f"{'.'.join(map(str, (*within, *place)))} must {rule}, got {shown}."


class ReplayError(Exception):
    """A person can put it right."""


class InvalidRecord(ReplayError, ValueError):
    """A row that breaks the buffer's rules; nothing of its append has been stored."""


class CorruptTrajectory(ReplayError):
    """A stored row that is no longer what was written."""

    def __init__(self, trajectory: str, reason: str) -> None:
        super().__init__(
            f"trajectory {trajectory} must read back as it was written, got {reason}. "
            "It is never drawn again; its iteration can be collected again."
        )


class DamagedDatabase(ReplayError):
    """Something in it can't have been written there."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"database must hold what was written, got {found}: it is damaged. "
            "See what is, and set damaged rows aside: agentloop replay verify"
        )
        self.found = found


class ContentGone(ReplayError):
    """A stored row whose tokens were evicted, forgotten or never kept; its numbers are still there."""

    def __init__(self, trajectory: str, reason: str | None) -> None:
        super().__init__(
            f"trajectory {trajectory} must still have its tokens, got an evicted one ({reason or 'no reason known'}). "
            "See its numbers: agentloop replay lineage ID"
        )


class RunReplaced(ReplayError):
    """Another process has resumed the run; nothing of the call has been stored."""


class SessionForgotten(ReplayError):
    """A session was forgotten while it was under way; nothing of the call has been stored."""


class DatabaseRefused(ReplayError):
    """Missing, foreign, of another version, or not accessible; it has not been changed."""


class OtherSchema(DatabaseRefused):
    """Of an older or newer version of this project: waiting does not help."""


class DatabaseFailed(ReplayError):
    """It could not be read or written now: its disk, its server, or the way there."""


class ConnectionLost(DatabaseFailed):
    """The server went away in the middle of a transaction; what its text says is known of the outcome."""
