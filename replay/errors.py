"""What the buffer refuses, by name. Each text is one line: the rule, what was found, what to do."""

from __future__ import annotations


class ReplayError(Exception):
    """A person can put it right."""


class InvalidRecord(ReplayError, ValueError):
    """A row that breaks the buffer's rules; nothing of its append has been stored."""


class CorruptTrajectory(ReplayError):
    """A stored row that is no longer what was written."""

    def __init__(self, trajectory: str, reason: str) -> None:
        super().__init__(
            f"trajectory {trajectory} must read back as it was written, got {reason}. "
            "It is never drawn again; its iteration can be collected anew."
        )
        self.trajectory = trajectory
        self.reason = reason


class ContentGone(ReplayError):
    """A stored row whose tokens were evicted, forgotten or never kept; its numbers are still there."""

    def __init__(self, trajectory: str, reason: str | None) -> None:
        super().__init__(
            f"trajectory {trajectory} must still have its tokens, got an evicted one ({reason or 'no reason told'}). "
            "See its numbers: agentloop replay lineage ID"
        )
        self.trajectory = trajectory


class RunReplaced(ReplayError):
    """Another process has resumed the run; nothing of the call has been stored."""


class DatabaseRefused(ReplayError):
    """Missing, foreign, of another version, or not accessible; it has not been changed."""


class DatabaseFailed(ReplayError):
    """It could not be read or written now: its disk, its server, or the way there."""


class ConnectionLost(DatabaseFailed):
    """The server went away in the middle of a transaction; what its text says is known of the outcome."""
