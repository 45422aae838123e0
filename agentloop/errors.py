"""Failures that end a run, by name."""

from __future__ import annotations


class TrainingStopped(RuntimeError):
    """The run can't go on learning; nothing of the failed optimizer step has been applied."""


class RankLost(TrainingStopped):
    """One of several processes that learn together is gone or says nothing."""


class UserError(Exception):
    """What a person can put right, in one line: the rule, what was found, what to do. No traceback."""


class UnknownAnchor(UserError, ValueError):
    """A token is to be trained against a log-prob that nobody knows."""


class TruncatedSampling(UserError, ValueError):
    """A stored log-prob of top-p or top-k sampling would enter a ratio."""


_MOST_CHARACTERS = 300


def shortened(text: str) -> str:
    """The same on one line and of bounded length."""
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."


def one_line(error: BaseException) -> str:
    """`ValueError: text` of any exception, on one line and of bounded length."""
    try:
        text = shortened(str(error))
    except Exception:  # noqa: BLE001  someone else's exception may fail to print itself
        text = ""
    name = type(error).__name__
    return f"{name}: {text}" if text else name
