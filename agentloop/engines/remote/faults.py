"""What may be wrong with an answer, by name, and which of it is asked for again."""

from __future__ import annotations

from enum import StrEnum


class FaultKind(StrEnum):
    CONNECTION = "connection"
    """No connection, or it was lost before the answer began."""
    BUSY = "busy"
    """Status 429."""
    SERVER_ERROR = "server_error"
    """Status 5xx."""
    CUT_BODY = "cut_body"
    """The answer ended in the middle, or is no JSON."""
    ABORTED = "aborted"
    """The server gave the reply up."""
    UNPROVED_VERSION = "unproved_version"
    """Weights that this engine has not been proved for have sampled."""
    DEADLINE = "deadline"
    """The turn's time was over."""
    REFUSED = "refused"
    """The request is wrong, and stays so: any other status, or a prompt that leaves no room for the reply."""
    WRONG_REPLY = "wrong_reply"
    """The answer does not hold what a reply to this request must."""


ASKED_AGAIN = frozenset(FaultKind) - {FaultKind.DEADLINE, FaultKind.REFUSED, FaultKind.WRONG_REPLY}
"""Faults that say nothing about what was sampled: the next try may pass, and samples as the first would have.

A reply that is wrong in itself is not asked for again. It is wrong because of its tokens (a cut one is a long one), so
a second try would prefer tokens that happen to pass, and no log-prob records such a preference.
"""

GONE = frozenset({FaultKind.CONNECTION, FaultKind.UNPROVED_VERSION})
"""The engine is restarting, or has restarted and is not proved yet: no try is lost by waiting for it."""


class EngineFault(Exception):
    """One try has given nothing that may be recorded."""

    def __init__(self, kind: FaultKind, text: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.retry_after_s = retry_after_s
        """Seconds that the server asks to be left alone; None where it does not say."""
