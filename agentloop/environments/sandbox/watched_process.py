"""A process whose output, time and memory are watched, and of which nothing is left when its run has ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from agentloop.environments.sandbox.sandbox_run import SandboxFailed, SandboxLimits, Stopped

_LOOK_S = 0.05
_CHUNK = 1 << 16
_TO_DIE_S = 10.0


class Contained(Protocol):
    """What the processes of a run are known by."""

    def memory(self) -> int:
        """Bytes that they hold together."""
        ...

    def end(self) -> None:
        """Kill them all, and come back when they are dead."""
        ...


class ProcessGroup:
    """The process group of a program that nothing contains; what leaves the group is not found."""

    def __init__(self, leader: int) -> None:
        self._leader = leader

    def memory(self) -> int:
        return 0

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._leader, signal.SIGKILL)


class ProcessNamespace:
    """The process namespace whose first process is `first`: when that dies, the kernel kills all others."""

    def __init__(self, first: int) -> None:
        """`first` must be alive, or not reaped yet."""
        self._first = first
        self._fd = os.pidfd_open(first)

    def memory(self) -> int:
        processes = f"/proc/{self._first}/root/proc"
        held = 0
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if os.stat(processes).st_dev == os.stat("/proc").st_dev:
                return 0  # it is still on its way into the sandbox, and this is the machine's list
            for name in filter(str.isdigit, os.listdir(processes)):
                held += _own_bytes(f"{processes}/{name}/statm")
        return held

    def end(self) -> None:
        try:
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            if not wait_readable(self._fd, _TO_DIE_S):
                raise SandboxFailed(f"process {self._first} did not die within {_TO_DIE_S:g} s of being killed")
        except ProcessLookupError:
            pass  # dead and reaped
        finally:
            os.close(self._fd)


def _own_bytes(statm: str) -> int:
    """Memory of a process that is no file's; 0 if it has ended."""
    try:
        with open(statm, "rb") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def wait_readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(seconds, 0.0) * 1000))


def start(
    command: Sequence[str], *, output: int, pass_fds: Sequence[int] = (), folder: str | None = None
) -> subprocess.Popen[bytes]:
    """In a session of its own, with both streams into `output`, nothing to read, and no environment variables."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={},
        cwd=folder,
        pass_fds=pass_fds,
        start_new_session=True,
    )


class Watch:
    """What a process has printed so far, and whether it may go on."""

    def __init__(self, process: subprocess.Popen[bytes], output: int, limits: SandboxLimits, deadline: float) -> None:
        """`output` is the end to read from."""
        self.printed = bytearray()
        self._process = process
        self._output = output
        self._limits = limits
        self._deadline = deadline
        os.set_blocking(output, False)

    def until_it_ends(self, contained: Contained) -> Stopped | None:
        """The limit that ended it. Whatever it has started is dead then, also when this raises."""
        try:
            stopped = self._go_on(contained)
        finally:
            contained.end()
            self._process.wait()
        self._read()  # what the last ones wrote: nobody writes any more
        return "output" if stopped is None and self._flooded else stopped

    @property
    def _flooded(self) -> bool:
        return len(self.printed) > self._limits.output_bytes

    def _go_on(self, contained: Contained) -> Stopped | None:
        looked, open_ = time.monotonic(), True
        while True:
            # Short waits: a deadline of the tool's own is raised in this thread between two of them.
            wait = min(_LOOK_S, self._deadline - time.monotonic())
            if open_:
                if wait_readable(self._output, wait):
                    open_ = self._read()
            else:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(max(wait, 0.0))
            if self._flooded:
                return "output"
            if self._process.poll() is not None:
                return None
            now = time.monotonic()
            if now >= self._deadline:
                return "time"
            if now - looked >= _LOOK_S:
                looked = now
                if contained.memory() > self._limits.memory_mb << 20:
                    return "memory"

    def _read(self) -> bool:
        """Take what is there, up to one chunk more than the limit; False at its end."""
        while not self._flooded:
            try:
                chunk = os.read(self._output, _CHUNK)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self.printed += chunk
        return True
