"""Runs a Python program that nobody has read, in a sandbox or without one, and says what became of it."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Literal

from agentloop.environments.environment import Environment, tool
from agentloop.environments.sandbox.bubblewrap import (
    Interpreter,
    MemoryGroup,
    SandboxFailed,
    SandboxLimits,
    Stopped,
    command,
    interpreters,
    memory_group,
)
from agentloop.errors import UserError

SandboxKind = Literal["bubblewrap", "none"]
_TRIAL = SandboxLimits(seconds=20.0)
_LOOK_S = 0.05
_CHUNK = 1 << 16
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SandboxRun:
    """What became of a program."""

    output: str
    """What it printed, both streams in order, cut at the limit."""
    exit_code: int | None
    """128 + signal where a signal ended it; None where a limit did."""
    stopped: Stopped | None
    """The limit that ended it."""
    limits: SandboxLimits

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0

    def observation(self) -> str:
        """The output with how it ended, where it did not end well: what a policy is shown."""
        output = self.output.rstrip("\n")
        if self.succeeded:
            return output or "(no output)"
        endings = {
            "time": f"stopped: it took longer than {self.limits.seconds:g} s",
            "memory": f"stopped: it took more than {self.limits.memory_mb} MiB of memory",
            "output": f"stopped: it printed more than {self.limits.output_bytes} bytes",
        }
        ending = f"exit code {self.exit_code}" if self.stopped is None else endings[self.stopped]
        return f"{output}\n[{ending}]".lstrip("\n")


class PythonSandbox:
    """Runs programs, each by itself, with the standard library and two places to write, which go with it.

    With `none` nothing contains a program: it can do whatever the user can, and only time and output are limited.
    """

    def __init__(self, kind: SandboxKind = "bubblewrap", limits: SandboxLimits | None = None) -> None:
        """Raises UserError where bubblewrap can't contain a program."""
        if kind not in ("bubblewrap", "none"):
            raise UserError(f"sandbox must be bubblewrap or none, got {kind!r}. Set one of them.")
        self.limits = limits or SandboxLimits()
        self._interpreter = usable_interpreter() if kind == "bubblewrap" else None

    def run(self, program: str) -> SandboxRun:
        """Run a program to its end or to a limit. Raises SandboxFailed where it could not be begun."""
        if self._interpreter is None:
            return _run_uncontained(program, self.limits)
        return _run_contained(program, self.limits, self._interpreter)


class SandboxedPython(Environment):
    """Base class with the tool `run_python`; tasks and rewards may run programs in `self.sandbox` too."""

    def __init__(self, *, sandbox: SandboxKind = "bubblewrap", limits: SandboxLimits | None = None) -> None:
        self.sandbox = PythonSandbox(sandbox, limits)

    @tool
    def run_python(self, code: str) -> str:
        """Run a Python program and see what it prints.

        Args:
            code: The whole program; each call starts a new one.
        """
        return self.sandbox.run(code).observation()


@cache
def usable_interpreter() -> Interpreter:
    """The first Python that runs in a sandbox here. Raises UserError where none does."""
    problem = ""
    for interpreter in interpreters():
        try:
            done = _run_contained("print(6 * 7)", _TRIAL, interpreter)
        except SandboxFailed as error:
            problem = str(error)
            continue
        if done.succeeded and done.output == "42\n":
            with memory_group(_TRIAL.memory_mb) as group:
                if group is None:
                    _log.warning(
                        "sandbox must be let make cgroups to limit the memory of all processes of a program together, "
                        "got none on this machine: SandboxLimits.memory_mb holds for each of them."
                    )
            return interpreter
        problem = " ".join(done.observation().split())
    raise UserError(
        f"sandbox must be able to contain a program on this machine, got: {problem}. Install bubblewrap 0.8 or newer "
        "where user namespaces are allowed, or set sandbox: none to run code that nothing contains."
    )


def _run_contained(program: str, limits: SandboxLimits, interpreter: Interpreter) -> SandboxRun:
    with (
        memory_group(limits.memory_mb) as group,
        _pipe() as (status, status_end),
        FileIO(os.memfd_create("agentloop"), "r+b") as code,
    ):
        left = memoryview(program.encode("utf-8", "surrogatepass"))
        while left:
            left = left[code.write(left) :]
        code.seek(0)
        words = command(interpreter, limits, program=code.fileno(), status=status_end.fileno())
        said: list[dict[str, int]] = []

        def end(process: subprocess.Popen[bytes]) -> None:
            """When the first process of a namespace dies, the kernel kills all others before bubblewrap ends."""
            status_end.close()
            lines = status.read(_CHUNK).splitlines()
            said.extend(json.loads(line) for line in lines)
            if said and process.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(said[0]["child-pid"], signal.SIGKILL)
            elif not said:
                process.kill()
            process.wait()
            while lines := status.read(_CHUNK).splitlines():
                said.extend(json.loads(line) for line in lines)

        started = words if group is None else group.entered(words)
        output, stopped = _watched(started, limits, end=end, group=group, pass_fds=(code.fileno(), status_end.fileno()))
    exit_code = next((line["exit-code"] for line in said if "exit-code" in line), None)
    if exit_code is None and stopped is None:
        raise SandboxFailed(f"bubblewrap must begin, got {' '.join(output.split()) or 'no word'}")
    return SandboxRun(output, exit_code if stopped is None else None, stopped, limits)


def _run_uncontained(program: str, limits: SandboxLimits) -> SandboxRun:
    """A run without a sandbox: of what it starts, only what stays in its process group is killed."""
    codes: list[int] = []

    def end(process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        codes.append(process.wait())

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "main.py")
        path.write_text(program, encoding="utf-8", errors="surrogatepass")
        output, stopped = _watched([sys.executable, "-I", str(path)], limits, end=end, folder=folder)
    code = 128 - codes[0] if codes[0] < 0 else codes[0]
    return SandboxRun(output, code if stopped is None else None, stopped, limits)


def _watched(
    words: Sequence[str],
    limits: SandboxLimits,
    *,
    end: Callable[[subprocess.Popen[bytes]], None],
    group: MemoryGroup | None = None,
    pass_fds: Sequence[int] = (),
    folder: str | None = None,
) -> tuple[str, Stopped | None]:
    """What the command printed until it ended, and the limit that ended it; `end` leaves nothing of it alive."""
    deadline = time.monotonic() + limits.seconds
    with _pipe() as (reading, writing):
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=writing.fileno(),
            stderr=writing.fileno(),
            env={},
            cwd=folder,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        writing.close()
        printed = bytearray()
        try:
            stopped = _read_until_the_end(process, reading, printed, limits, deadline=deadline, group=group)
        finally:
            end(process)
        while len(printed) <= limits.output_bytes and (chunk := reading.read(_CHUNK)):
            printed += chunk  # what the last ones wrote: nobody writes any more
        if len(printed) > limits.output_bytes and stopped is None:
            stopped = "output"
        if group is not None and group.is_exceeded():
            stopped = "memory"
    return printed[: limits.output_bytes].decode("utf-8", "replace"), stopped


def _read_until_the_end(
    process: subprocess.Popen[bytes],
    reading: FileIO,
    printed: bytearray,
    limits: SandboxLimits,
    *,
    deadline: float,
    group: MemoryGroup | None,
) -> Stopped | None:
    """Adds to `printed` until the process has ended, or returns the limit that it has reached."""
    os.set_blocking(reading.fileno(), False)
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    is_open = True
    while process.poll() is None:
        wait_s = min(_LOOK_S, deadline - time.monotonic())
        if wait_s <= 0:
            return "time"
        if not is_open:
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
        elif poll.poll(wait_s * 1000) and (chunk := reading.read(_CHUNK)) is not None:
            is_open = bool(chunk)
            printed += chunk
        if len(printed) > limits.output_bytes:
            return "output"
        if group is not None and group.is_exceeded():
            return "memory"
    return None


@contextmanager
def _pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """The end to read from, and the end to write to."""
    reading, writing = os.pipe()
    with FileIO(reading, "rb") as read_end, FileIO(writing, "wb") as write_end:
        yield read_end, write_end
