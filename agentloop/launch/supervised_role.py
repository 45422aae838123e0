"""Supervises one member of a role: starts it, restarts it when it dies, and ends it with all its processes."""

import json
import os
import signal
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from agentloop.errors import UserError
from agentloop.launch.roles import RoleMember
from agentloop.runs.run_folder import LOGS

MARK = "AGENTLOOP_LAUNCHED"
"""An environment variable that marks a member's processes. All its children inherit it, also in other sessions."""
MOST_ENDS = 5
"""The launch gives up after so many ends in a row, each a refusal or after a run of less than `LONG_RUN_S`."""
LONG_RUN_S = 60.0
_REFUSED = 2
"""The exit code of an error that the user can mend."""
_LOOK_AGAIN_S, _TO_END_S = 0.05, 10.0
_LAST_OUTPUT_S = 2.0
_LAST_LINES, _SILENT = 5, "it said nothing"
Show = Callable[[str, str], None]
"""Shows a line that a member printed; takes the member's name and the line."""


class SupervisedRole:
    """A supervised command. The constructor starts it; afterwards `look` is called at intervals."""

    def __init__(self, member: RoleMember, run: Path, environment: Mapping[str, str], *, show: Show) -> None:
        self.member = member
        self.exit_code: int | None = None
        """The exit code, once the command is not restarted any more."""
        self.failure: str | None = None
        """Why the command is not restarted, where that ends the launch."""
        self._mark = f"{run.absolute()}:{member.name}:{uuid.uuid4().hex}"
        self._environment, self._show = {**environment, "PYTHONUNBUFFERED": "1", MARK: self._mark}, show
        path = run / LOGS / f"{member.name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log, self._writing = path.open("a", encoding="utf-8"), threading.Lock()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._restarts = Restarts()
        self._due: float | None = None
        self._start()

    def look(self) -> None:
        """Note whether the command has ended, and restart it when its pause is over."""
        now = time.monotonic()
        if self.exit_code is not None:
            return
        if self._due is not None:
            if now >= self._due:
                self._start()
        elif (code := self._process.poll()) is not None:
            self._kill()  # the processes that it left behind
            self._note_end(code, now)

    def ask_to_leave(self) -> None:
        """Send SIGTERM to the command alone: torchrun passes it on, and would take a second one for 'at once'."""
        if self.exit_code is None and self.runs:
            self._process.send_signal(signal.SIGTERM)

    @property
    def runs(self) -> bool:
        return self._due is None and self._process.poll() is None

    def end(self) -> None:
        """End the command and all its processes; return once they are gone. A command that still runs is killed."""
        if self.runs:
            self._say(f"did not leave within {self.member.needs.stop_s:g} s and is killed")
        self._kill()
        if self.exit_code is None:
            self.exit_code = self._process.returncode
        with self._writing:
            self._log.close()

    def _start(self) -> None:
        self._due, self._started_at = None, time.monotonic()
        self._process = _start_process(self.member.command, self._environment)
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        self._record("started", pid=self._process.pid)

    def _kill(self) -> None:
        """Kill the command and all its processes; return once its last lines are read."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        kill_marked(self._mark)
        self._process.wait()
        self._reader.join(_LAST_OUTPUT_S)

    def _note_end(self, code: int, now: float) -> None:
        words = f"signal {-code}" if code < 0 else f"exit code {code}"
        name, last = self.member.name, " / ".join(line.strip() for line in self._lines if line.strip())[-600:]
        if code == 0 or (self.member.leads and not was_killed(code)):
            self.exit_code = code
            if code:
                self.failure = f"{name} must not fail, got {words}: {last or _SILENT}"
            self._say(f"has ended{f' with {words}' if code else ''}")
        elif (wait_s := self._restarts.next_wait_s(code, ran_s=now - self._started_at)) is None:
            self.exit_code = code
            found = f"{MOST_ENDS} ends one after the other, the last one with {words}"
            self.failure = f"{name} must stay up, got {found}: {last or _SILENT}"
        else:
            self._say(f"has died with {words}; started again in {wait_s:g} s")
            self._due = now + wait_s

    def _say(self, text: str) -> None:
        self._record("supervised", text=text)
        self._show(self.member.name, f"[{text}]")

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for printed in stream:
                line = printed.decode(errors="replace").rstrip("\r\n")
                self._lines.append(line)
                self._record("printed", text=line)
                self._show(self.member.name, line)

    def _record(self, event: str, **fields: Any) -> None:
        """Write an event to the log, as one JSON object on a line. The output's reader writes there too."""
        entry = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "role": self.member.name, "event": event}
        with self._writing:
            if not self._log.closed:
                self._log.write(json.dumps({**entry, **fields}, ensure_ascii=False) + "\n")
                self._log.flush()


class Restarts:
    """The ends of one member in a row, and the pauses before it is restarted."""

    def __init__(self) -> None:
        self._ends = 0

    def next_wait_s(self, code: int, *, ran_s: float) -> float | None:
        """Note an end; return the pause before the next start: 1, 2, 4, 8, and 1 again after a long run; None: none."""
        worked = ran_s > LONG_RUN_S and code != _REFUSED
        self._ends = 1 if worked else self._ends + 1
        return None if self._ends == MOST_ENDS else 2.0 ** (self._ends - 1)


def was_killed(code: int) -> bool:
    """Whether an exit code means a signal, and not an error that the command itself found."""
    return code < 0 or code > 128


def kill_marked(mark: str) -> None:
    """Kill every process with this mark, until none is left or the time is over."""
    end = time.monotonic() + _TO_END_S
    while (pids := list(_find_marked(mark))) and time.monotonic() < end:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_AGAIN_S)


def _find_marked(mark: str) -> Iterator[int]:
    """Find the processes with this mark. Without /proc it finds none: only the command's group is killed then."""
    wanted = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or just gone; a dead one's reads empty
            if wanted in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                yield int(path.parent.name)


def _start_process(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the launcher alone
        )
    except OSError as error:
        raise UserError(f"command must be one that starts, got {command[0]!r} ({error.strerror}). Mend it.") from error
