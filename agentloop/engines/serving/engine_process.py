"""One `vllm serve` under way, with all the processes it starts."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from agentloop.engines.serving.vllm_command import LOOPBACK
from agentloop.errors import UserError, shortened

_LOOK_AGAIN_S = 0.5
_GRACE_S = 20.0
_LAST_LINES = 200
_CAUSES = ("Error:", "error:")
# The kernel says when the process that started this program is gone, however it went; all of the group then goes. A
# handler for SIGTERM, which is not inherited: the group gets it, and this has to outlive the rest of it.
_ENDS_WITH_PARENT = """\
import ctypes, os, signal, subprocess, sys
signal.signal(signal.SIGUSR1, lambda *_: os.killpg(0, signal.SIGKILL))
signal.signal(signal.SIGTERM, lambda *_: None)
ctypes.CDLL(None).prctl(1, signal.SIGUSR1)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
code = subprocess.call(sys.argv[2:])
sys.exit(code if code >= 0 else 128 - code)
"""


class EngineProcess:
    """Started by the constructor; its output goes to `log`, after what is there. On Linux it ends with this process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, port: int, log: Path) -> None:
        _check_free(port)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("ab") as output:
            self._process = _started(command, environment, output)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until(self, ready: Callable[[], bool], *, limit_s: float, stopped: Callable[[], bool]) -> bool:
        """Wait until it is ready; False when `stopped` says so first. Raises UserError when it ends, or is too slow."""
        end = time.monotonic() + limit_s
        while not stopped():
            if self.exit_code is not None:
                raise UserError(
                    f"vllm serve must start, got exit code {self.exit_code}: {self.last_error()} All of it: {self._log}"
                )
            if ready():
                return True
            if time.monotonic() > end:
                raise UserError(
                    f"vllm serve must answer within {limit_s:g} s, got nothing. What it says: {self._log} "
                    "(`agentloop engine` takes a longer --start-timeout)"
                )
            time.sleep(_LOOK_AGAIN_S)
        return False

    def last_error(self) -> str:
        """The last line of its output that names an error, or the last one."""
        with self._log.open(encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in deque(file, _LAST_LINES) if line.strip()]
        causes = [line for line in lines if any(cause in line for cause in _CAUSES)]
        return shortened((causes or lines or ["it said nothing."])[-1])

    def end(self) -> None:
        """End it and every process it started: asked first, killed after a while."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        # Its workers may outlive it.
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _started(command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    before = [sys.executable, "-I", "-S", "-c", _ENDS_WITH_PARENT, str(os.getpid())]
    # A group of its own: Ctrl-C reaches this program alone, which then ends the group.
    return subprocess.Popen(
        [*(before if sys.platform == "linux" else ()), *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listening:
        return int(listening.getsockname()[1])


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise UserError(
                f"--port must be free, got {port} ({error.strerror}). End what listens there, attach to it with "
                f"--attach http://{LOOPBACK}:{port}, or choose another."
            ) from error
