"""Failures that end a run, a call or an iteration, by name."""

import errno
import os
import re
import shutil
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


class TrainingStopped(RuntimeError):
    """The run can't go on learning; nothing of the failed optimizer step has been applied."""


class RankLost(TrainingStopped):
    """One of several processes that learn together is gone or says nothing."""


class UserError(Exception):
    """An error that a person can put right. Its one line has the rule, the value found and the remedy; no traceback."""


class RunStop(SystemExit):
    """A signal ended this process. No code failed, so nobody may catch it."""


def raise_run_stop(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C in a command. RunStop differs from the KeyboardInterrupt that a user's code may raise."""
    raise RunStop(128 + number)


class NotJudged(Exception):
    """Raised by an environment, a simulated user, an agent or a judge that failed, so that nobody can judge the policy.

    The episode is left out of its group and counted, as when the engine fails. It is never a reward of 0.
    """


class WrongObservation(UserError):
    """An `Observation` that can't be stored. The run stops, because the policy could mend nothing."""


class UserCodeFailed(Exception):
    """The user's code raised the exception that is this one's cause; the text is `TypeError: text at file.py:12`."""


class UserCodeLate(UserCodeFailed):
    """A call of the user's code did not end within its time."""


_MOST_CHARACTERS = 300


def shortened(text: str) -> str:
    """Put a text on one line and cut it to a bounded length."""
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."


def one_line(error: BaseException) -> str:
    """Describe any exception as `ValueError: text`, on one line and of bounded length."""
    try:
        text = shortened(str(error))
    except Exception:  # noqa: BLE001  someone else's exception may fail to print itself
        text = ""
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def place_in_user_code(error: BaseException) -> str | None:
    """Find the last line of the user's own files that the exception passed, as `file.py:12`; None: it passed none."""
    if isinstance(error.__cause__, StopIteration):  # Python wraps it in another error where a coroutine raises it
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
    """Describe an exception from the user's own code as `ValueError: text at file.py:12`."""
    place = place_in_user_code(error)
    return one_line(error) if place is None else f"{one_line(error)} at {place}"


@contextmanager
def needing(extra: str, setting: str) -> Iterator[None]:
    """Turn a missing package in the block into a UserError about the `setting` that needs the `extra`."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"{setting} must not be used without its extra ({one_line(error)}). Install it: pip install "
            f"'agentloop-replay[{extra}]'."
        ) from error


@contextmanager
def explaining_disk(
    target: Path, *, option: str = "run.folder", advice: str = "Choose another with --set run.folder=PATH."
) -> Iterator[None]:
    """Turn a disk's error within the block into a UserError with its path and the free bytes."""
    try:
        yield
    except Exception as error:
        failure = _disk_failure(error)
        if failure is None:
            raise
        rule = "have room" if failure.errno in (errno.ENOSPC, errno.EDQUOT) else "be writable"
        free = shutil.disk_usage(next(path for path in (target, *target.parents) if path.is_dir())).free
        raise UserError(
            f"{option} must {rule}, got {failure.strerror or failure} at {failure.filename or target} "
            f"({free:,} bytes free). {advice}"
        ) from error


def _disk_failure(error: Exception) -> OSError | None:
    """The disk's failure behind an error, if there is one. Libraries written in Rust only name it in a text."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def short_traceback(function: _Function) -> _Function:
    """Let errors whose one line says everything leave a function that people call without the frames below it."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except (Exception, KeyboardInterrupt) as error:
            from replay.errors import ReplayError  # here: commands that fail early do not need the package

            if not isinstance(error, (UserError, TrainingStopped, ReplayError, KeyboardInterrupt)):
                raise
            raise error.with_traceback(None) from None

    return cast(_Function, call)
