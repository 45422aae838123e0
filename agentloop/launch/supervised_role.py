"""One member of a role: started, started again when it dies, and ended with all it started."""

import json
import os
import signal
import subprocess
import threading
import time
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
"""Environment variable of every role, which all it starts inherit: it finds them in sessions of their own, too."""
MOST_ENDS = 5
"""So many ends within `WINDOW_S`, or refusals in a row however slow, and the launch gives up."""
WINDOW_S = 60.0
_LONGEST_WAIT_S = 30.0
_REFUSED = 2
"""Exit code of what the user can mend."""
_LOOK_AGAIN_S, _TO_END_S = 0.05, 10.0
_LAST_WORDS_S = 2.0
_LAST_LINES, _SILENT = 5, "it said nothing"
Show = Callable[[str, str], None]
"""Gets the name of a member and each line it prints."""


class SupervisedRole:
    """Started by the constructor; afterwards `look` is called again and again."""

    def __init__(
        self, member: RoleMember, run: Path, environment: Mapping[str, str], *, launch: str, show: Show
    ) -> None:
        """`launch` names this launch: what is left of an earlier start of the member in it is killed first."""
        self.member = member
        self.exit_code: int | None = None
        """Set once it is not started again."""
        self.failure: str | None = None
        """Why it is not, where that ends the launch."""
        self._mark = f"{run.absolute()}:{member.name}:{launch}"
        self._environment, self._show = {**environment, "PYTHONUNBUFFERED": "1", MARK: self._mark}, show
        path = run / LOGS / f"{member.name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log, self._writing = path.open("a", encoding="utf-8"), threading.Lock()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._restarts = Restarts()
        self._due: float | None = None
        self._start()

    def look(self) -> None:
        """Start it again where it has ended and that is due."""
        now = time.monotonic()
        if self.exit_code is not None:
            return
        if self._due is not None:
            if now >= self._due:
                self._start()
        elif (code := self._process.poll()) is not None:
            self._kill()  # what it left behind
            self._ended(code, now)

    def ask_to_leave(self) -> None:
        """SIGTERM for the command alone: torchrun, say, passes it on, and a second one would mean: at once."""
        if self.exit_code is None and self.runs:
            self._process.send_signal(signal.SIGTERM)

    @property
    def runs(self) -> bool:
        return self._due is None and self._process.poll() is None

    def end(self) -> None:
        """It and all it started are gone when this returns; it is killed where it did not leave by itself."""
        if self.runs:
            self._say(f"did not leave within {self.member.needs.stop_s:g} s and is killed")
        self._kill()
        if self.exit_code is None:
            self.exit_code = self._process.returncode
        with self._writing:
            self._log.close()

    def _start(self) -> None:
        self._due, self._started_at = None, time.monotonic()
        kill_marked(self._mark)
        self._process = _started(self.member.command, self._environment)
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        self._record("started", pid=self._process.pid)

    def _kill(self) -> None:
        """End it and all it started, now; returns once its last lines are read."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        kill_marked(self._mark)
        self._process.wait()
        self._reader.join(_LAST_WORDS_S)

    def _ended(self, code: int, now: float) -> None:
        words = f"signal {-code}" if code < 0 else f"exit code {code}"
        name, last = self.member.name, " / ".join(line.strip() for line in self._lines if line.strip())[-600:]
        if code == 0 or (self.member.leads and not was_killed(code)):
            self.exit_code = code
            if code:
                self.failure = f"{name} must not fail, got {words}: {last or _SILENT}"
            self._say(f"has ended{f' with {words}' if code else ''}")
        elif (wait_s := self._restarts.ended(code, now=now, ran_s=now - self._started_at)) is None:
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
        """One JSON object on a line, for whatever collects logs; the reader of its output writes too."""
        entry = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "role": self.member.name, "event": event}
        with self._writing:
            if not self._log.closed:
                self._log.write(json.dumps({**entry, **fields}, ensure_ascii=False) + "\n")
                self._log.flush()


class Restarts:
    """The ends of one role: when it is started again, and when not any more."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=MOST_ENDS)
        self._refusals, self._wait_s = 0, 0.5

    def ended(self, code: int, *, now: float, ran_s: float) -> float | None:
        """Seconds to wait before the next start: 1, 2, 4, ... and from 1 again after a minute's run; None: no more."""
        self._ends.append(now)
        self._refusals = self._refusals + 1 if code == _REFUSED else 0
        if self._refusals == MOST_ENDS or (len(self._ends) == MOST_ENDS and now - self._ends[0] <= WINDOW_S):
            return None
        self._wait_s = 1.0 if ran_s > WINDOW_S else min(2 * self._wait_s, _LONGEST_WAIT_S)
        return self._wait_s


def was_killed(code: int) -> bool:
    """Whether an exit code stands for a signal, and not for what the command itself found."""
    return code < 0 or code > 128


def kill_marked(mark: str) -> None:
    """SIGKILL for every process with this mark, until there is none, or one that can't be ended has its time."""
    end = time.monotonic() + _TO_END_S
    while (pids := list(_marked(mark))) and time.monotonic() < end:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_AGAIN_S)


def _marked(mark: str) -> Iterator[int]:
    """Nothing where there is no /proc: there only the group of the command is killed."""
    wanted = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or just gone; a dead one's reads empty
            if wanted in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                yield int(path.parent.name)


def _started(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
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
