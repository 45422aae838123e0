"""Failures that end a run, a call or an iteration, by name."""

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class TrainingStopped(RuntimeError):
    """The run can't go on learning; nothing of the failed optimizer step has been applied."""


class RankLost(TrainingStopped):
    """One of several processes that learn together is gone or says nothing."""


class UserError(Exception):
    """What a person can put right, in one line: the rule, what was found, what to do. No traceback."""


class RunStop(SystemExit):
    """Somebody ended this process by a signal: no error of anybody's code, and nobody's to catch."""


class ToolTimeout(BaseException):
    """The time of a tool is up. No `Exception`, so that a tool seldom catches it where it is raised inside."""


class UserCodeFailed(Exception):
    """Code of the user's raised something, which is the cause of this; its text is `TypeError: text at file.py:12`."""


class UserCodeLate(UserCodeFailed):
    """It has not ended within its time."""


class UnknownAnchor(UserError, ValueError):
    """A token is to be trained against a log-prob that nobody knows."""


class TruncatedSampling(UserError, ValueError):
    """A stored log-prob of top-p or top-k sampling would enter a ratio."""


_MOST_CHARACTERS = 300


def shortened(text: str) -> str:
    """A text on one line and of bounded length."""
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


def place_in_user_code(error: BaseException) -> str | None:
    """The last line of the user's own files that the exception came through, as `file.py:12`; None for none."""
    if isinstance(error.__cause__, StopIteration):  # of which Python makes another error where a coroutine raises it
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if _is_users(Path(frame.filename))]
    return theirs[-1] if theirs else None


_PROJECT = Path(__file__).parents[1]
_OTHERS = [Path(sysconfig.get_path("stdlib")), *(_PROJECT / name for name in ("agentloop", "replay", "context"))]


def _is_users(path: Path) -> bool:
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return path.is_absolute() and not installed and not any(path.is_relative_to(folder) for folder in _OTHERS)


def one_line_with_place(error: BaseException) -> str:
    """`ValueError: text at file.py:12` of an exception that came out of the user's own code."""
    place = place_in_user_code(error)
    return one_line(error) if place is None else f"{one_line(error)} at {place}"


@contextmanager
def needing(extra: str, setting: str) -> Iterator[None]:
    """Within, what an extra installs is imported; UserError about the `setting` that asks for it if it is missing."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"{setting} must not be used without its extra ({one_line(error)}). Install it: pip install "
            f"'agentloop-replay[{extra}]'."
        ) from error
