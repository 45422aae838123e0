"""One member of a role: started, started again when it dies, and ended with all it started."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from agentloop.errors import UserError
from agentloop.launch.child_group import ChildGroup
from agentloop.launch.restarts import MOST_ENDS, Restarts, in_words, last_words, was_killed
from agentloop.launch.role_commands import RoleMember
from agentloop.runs.run_folder import LOGS

_LAST_LINES = 5


class SupervisedRole:
    """Started by the constructor; afterwards `look` is called again and again."""

    def __init__(
        self, member: RoleMember, run: Path, environment: Mapping[str, str], *, show: Callable[[str, str], None]
    ) -> None:
        """`show` gets the member's name and each line it prints, which is in its log by then."""
        self.member = member
        self.exit_code: int | None = None
        """Set once it is not started again."""
        self.failure: str | None = None
        """Why it is not, where that ends the launch."""
        self._mark = mark_of(run, member)
        self._environment, self._show = environment, show
        self._log, self._writing = _open_log(run / LOGS / f"{member.name}.jsonl", member), threading.Lock()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._restarts = Restarts()
        self._due: float | None = None
        self._start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def look(self) -> None:
        """Start it again where it has ended and that is due."""
        now = time.monotonic()
        if self.exit_code is not None:
            return
        if self._due is not None:
            if now >= self._due:
                self._start()
            return
        code = self._child.exit_code
        if code is not None:
            self._child.kill()  # what it left behind
            self._ended(code, now)

    def ask_to_leave(self) -> None:
        if self.exit_code is None and self._due is None:
            self._child.ask_to_leave()

    @property
    def runs(self) -> bool:
        return self._due is None and self._child.exit_code is None

    def end(self) -> None:
        """It and all it started are gone when this returns; it is killed where it did not leave by itself."""
        if self.runs:
            self._say(f"did not leave within {self.member.needs.stop_s:g} s and is killed")
        self._child.kill()
        if self.exit_code is None:
            self.exit_code = self._child.exit_code
        with self._writing:
            self._log.close()

    def _start(self) -> None:
        self._due, self._started_at = None, time.monotonic()
        self._child = ChildGroup(self.member.command, self._environment, mark=self._mark, write=self._write)
        self._record("started", pid=self._child.pid)

    def _ended(self, code: int, now: float) -> None:
        if code == 0 or (self.member.leads and not was_killed(code)):
            self.exit_code = code
            if code:
                self.failure = f"{self.member.name} must not fail, got {in_words(code)}: {last_words(self._lines)}"
            self._say("has ended" if code == 0 else f"has ended with {in_words(code)}")
            return
        wait_s = self._restarts.ended(code, now=now, ran_s=now - self._started_at)
        if wait_s is None:
            self.exit_code = code
            self.failure = (
                f"{self.member.name} must stay up, got {MOST_ENDS} ends one after the other, the last one with "
                f"{in_words(code)}: {last_words(self._lines)}"
            )
        else:
            self._say(f"has died with {in_words(code)}; started again in {wait_s:g} s")
            self._due = now + wait_s

    def _say(self, text: str) -> None:
        self._record("supervised", text=text)
        self._show(self.member.name, f"[{text}]")

    def _write(self, line: str) -> None:
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


def _open_log(path: Path, member: RoleMember) -> IO[str]:
    """The member's log, which is locked as long as it is supervised: nobody else may start it, nor end what is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        log.close()
        raise UserError(
            f"--run must name a run whose {member.name} nobody else launches, got {path.parent.parent}. "
            "End the other launch, or start a new run."
        ) from error
    return log


def mark_of(run: Path, member: RoleMember) -> str:
    """What marks the processes of this member, whoever launched them."""
    return f"{run.absolute()}:{member.name}"
