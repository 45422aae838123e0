"""One command under way with everything it starts, also in sessions of their own: all of it ends with the command."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from agentloop.errors import UserError

MARK = "AGENTLOOP_LAUNCHED"
"""Environment variable of every role, which all it starts inherit: by it they are found when it is gone."""
_LOOK_AGAIN_S = 0.05
_LAST_WORDS_S = 2.0


class ChildGroup:
    """Started by the constructor; each line it prints goes to `write`, from a thread."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, mark: str, write: Callable[[str], None]
    ) -> None:
        """`mark`: names the role and its run; what is left of an earlier start under that name is killed first."""
        kill_marked(mark)
        self._mark = mark
        self._process = _started(command, {**environment, "PYTHONUNBUFFERED": "1", MARK: mark})
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=_read, args=(self._process.stdout, write), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal that ended it."""
        return self._process.poll()

    def ask_to_leave(self) -> None:
        """SIGTERM for the command alone: torchrun, say, passes it on, and a second one would mean: at once."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all it started, now; returns once its last lines are read."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        kill_marked(self._mark)
        self._process.wait()
        self._reader.join(_LAST_WORDS_S)


def kill_marked(mark: str) -> int:
    """SIGKILL for every process with this mark, until there is none; how many there were."""
    killed: set[int] = set()
    while pids := list(_marked(mark)):
        killed.update(pids)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_AGAIN_S)
    return len(killed)


def _marked(mark: str) -> Iterator[int]:
    """Nothing where there is no /proc: there only the group of the command is killed."""
    wanted = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or just gone; a dead one's reads empty
            if wanted in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                yield int(path.parent.name)


def _started(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        # A session of its own: Ctrl-C reaches the launcher alone.
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(f"command must be one that starts, got {command[0]!r} ({error.strerror}). Mend it.") from error


def _read(stream: IO[bytes], write: Callable[[str], None]) -> None:
    with stream:
        for line in stream:
            write(line.decode(errors="replace").rstrip("\r\n"))
