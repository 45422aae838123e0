"""The errors of the buffer. Each message is one line: the rule, the value found, and what to do."""

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
    "recursion_loop": _DEEP,  # the name before pydantic 2.14; values read from JSON have no loops
}
_ABOUT_KEYS = {"extra_forbidden": "be a known key, got an unknown one", "missing": "be given, got nothing"}
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shortened(value: object) -> str:
    """The value as one short line of a message."""
    return _SHORT.repr(value)


def first_problem(error: ValidationError) -> tuple[tuple[str | int, ...], str, str]:
    """The place of the first problem, the rule it breaks, and the value found. An unknown column comes before a missing
    one, for it may be the missing one misspelled."""
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
    """The first problem as a sentence: `replay.fraction must be greater than or equal to 0, got -1.` Its place begins
    with `within`. A rule over several keys is a sentence already."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] in _ABOUT_KEYS:
        return f"{'.'.join(map(str, (*within, *first['loc'])))} must {_ABOUT_KEYS[first['type']]}."
    place, rule, shown = first_problem(error)
    return f"{'.'.join(map(str, (*within, *place)))} must {rule}, got {shown}."


class ReplayError(Exception):
    """The base of all errors of this package; a person can mend the cause of each."""


class InvalidRecord(ReplayError, ValueError):
    """A row breaks the buffer's rules; nothing of the call has been stored."""


class CorruptTrajectory(ReplayError):
    """A stored row differs from what was written."""

    def __init__(self, trajectory: str, reason: str) -> None:
        super().__init__(
            f"trajectory {trajectory} must read back as it was written, got {reason}. "
            "The row is never drawn again. Its iteration can be collected again."
        )


class DamagedDatabase(ReplayError):
    """The database holds something that no agentloop wrote there."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"database must hold what was written, got {found}: it is damaged. "
            "List the damage, and set damaged rows aside: agentloop replay verify"
        )
        self.found = found


class ContentGone(ReplayError):
    """The tokens of a stored row were evicted, forgotten or never stored; its numbers are still there."""

    def __init__(self, trajectory: str, reason: str | None) -> None:
        super().__init__(
            f"trajectory {trajectory} must still have its tokens, got an evicted one ({reason or 'no reason known'}). "
            "See its numbers: agentloop replay show ID"
        )


class RunReplaced(ReplayError):
    """Another process has resumed the run; nothing of the call has been stored."""


class SessionForgotten(ReplayError):
    """A session was forgotten while it was under way; nothing of the call has been stored."""


class DatabaseRefused(ReplayError):
    """The database is missing, not agentloop's, of another version, or not accessible. It has not been changed."""


class OtherSchema(DatabaseRefused):
    """An older or newer version of agentloop wrote the database: waiting does not help."""


class DatabaseFailed(ReplayError):
    """The database could not be read or written now, for its disk, its server or the network failed."""


class ConnectionLost(DatabaseFailed):
    """The server went away during a transaction. The message says whether the transaction may have been committed."""
