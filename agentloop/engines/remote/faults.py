"""What may be wrong with an answer, by name, and which of it is asked for again."""

from __future__ import annotations

from enum import StrEnum


class FaultKind(StrEnum):
    CONNECTION = "connection"
    """No connection, or it was lost before the answer began."""
    DEADLINE = "deadline"
    """The turn's time was over."""
    BUSY = "busy"
    """Status 429."""
    SERVER_ERROR = "server_error"
    """Status 5xx."""
    CUT_BODY = "cut_body"
    """The answer ended in the middle."""
    ABORTED = "aborted"
    """The server gave the reply up."""
    UNPROVED_VERSION = "unproved_version"
    """Weights that this engine has not been proved for have sampled."""
    REFUSED = "refused"
    """Any other status: the request is wrong, and stays so."""
    TOO_LONG = "too_long"
    """The prompt leaves no room for the reply."""
    MALFORMED = "malformed"
    """Not the JSON that the route answers with."""
    PROMPT_TOKENS = "prompt_tokens"
    """The server has read another number of tokens than it was sent."""
    TOO_MANY_TOKENS = "too_many_tokens"
    CUT_SHORT = "cut_short"
    """It says that the reply reached its length, and it is shorter."""
    LENGTHS = "lengths"
    """There is not one log-prob to each token."""
    TOKEN_IDS = "token_ids"
    """Log-probs are those of other tokens."""
    VOCABULARY = "vocabulary"
    """A token that the policy does not have."""
    LOG_PROBS = "log_probs"
    """A log-prob that is unknown, not finite or above 0."""
    FINISH_REASON = "finish_reason"
    """The reply did not end where it had to."""
    VERSION_SPANS = "version_spans"
    """Some token has no version, or two."""
    OTHER_MODEL = "other_model"
    """Another model than the one asked for has sampled."""


ASKED_AGAIN = frozenset(
    {
        FaultKind.CONNECTION,
        FaultKind.BUSY,
        FaultKind.SERVER_ERROR,
        FaultKind.CUT_BODY,
        FaultKind.ABORTED,
        FaultKind.UNPROVED_VERSION,
    }
)
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
