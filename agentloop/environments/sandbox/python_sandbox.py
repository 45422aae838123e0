"""Runs a Python program that nobody has read, in a sandbox or without one, and says what became of it."""

from __future__ import annotations

import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Literal

from agentloop.environments.sandbox import bubblewrap
from agentloop.environments.sandbox.bubblewrap import Interpreter
from agentloop.environments.sandbox.sandbox_run import SandboxFailed, SandboxLimits, SandboxRun, Stopped
from agentloop.environments.sandbox.sandboxed_start import pipe, started
from agentloop.environments.sandbox.watched_process import ProcessGroup, Watch, start
from agentloop.errors import UserError

SandboxKind = Literal["bubblewrap", "none"]
_TRIAL = SandboxLimits(seconds=20.0)


class PythonSandbox:
    """Runs programs, each by itself: none finds what another one has left.

    A program sees the standard library and the system's files, and can write to /tmp and /dev/shm, which go with it.
    With `none` nothing contains it: it can do whatever the user can, and only time and output are limited.
    """

    def __init__(self, kind: SandboxKind = "bubblewrap", limits: SandboxLimits | None = None) -> None:
        """Raises UserError where bubblewrap can't contain a program."""
        if kind not in ("bubblewrap", "none"):
            raise UserError(f"sandbox must be bubblewrap or none, got {kind!r}. Set one of them.")
        self.limits = limits or SandboxLimits()
        self._interpreter = usable_interpreter() if kind == "bubblewrap" else None

    def run(self, program: str) -> SandboxRun:
        """Run it to its end or to a limit. In a sandbox, nothing that it started is alive afterwards.

        Raises SandboxFailed where it could not be begun.
        """
        if self._interpreter is None:
            return _run_uncontained(program, self.limits)
        return _run_contained(program, self.limits, self._interpreter)


@cache
def usable_interpreter() -> Interpreter:
    """The first Python that runs in a sandbox here. Raises UserError where none does."""
    problem = ""
    try:
        bubblewrap.check_tools()
        for interpreter in bubblewrap.interpreters():
            problem = _problem_of(interpreter)
            if not problem:
                return interpreter
    except SandboxFailed as error:
        problem = str(error)
    raise UserError(
        f"sandbox must be able to contain a program on this machine, got: {problem}. Install bubblewrap 0.8 or newer "
        "where user namespaces are allowed, or set sandbox: none to run code that nothing contains."
    )


def _problem_of(interpreter: Interpreter) -> str:
    """Why no program can be run on it; nothing where one can."""
    try:
        done = _run_contained("print(6 * 7)", _TRIAL, interpreter)
    except SandboxFailed as error:
        return str(error)
    return "" if done.succeeded and done.output == "42\n" else " ".join(done.observation().split())


def _run_contained(program: str, limits: SandboxLimits, interpreter: Interpreter) -> SandboxRun:
    deadline = time.monotonic() + limits.seconds
    with started(program, limits, interpreter) as sandbox:
        watch = Watch(sandbox.process, sandbox.output.fileno(), limits, deadline)
        stopped = watch.until_it_ends(sandbox.namespace)
        code = sandbox.exit_code()
    run = _outcome(watch, stopped, code, limits)
    if code is None and stopped is None:
        raise SandboxFailed(f"bubblewrap must begin, got {' '.join(run.output.split()) or 'no word'}")
    return run


def _run_uncontained(program: str, limits: SandboxLimits) -> SandboxRun:
    deadline = time.monotonic() + limits.seconds
    with tempfile.TemporaryDirectory() as folder, pipe() as (output, output_end):
        path = Path(folder, "main.py")
        path.write_text(program, encoding="utf-8", errors="surrogatepass")
        process = start([sys.executable, "-I", str(path)], output=output_end.fileno(), folder=folder)
        output_end.close()
        watch = Watch(process, output.fileno(), limits, deadline)
        stopped = watch.until_it_ends(ProcessGroup(process.pid))
    code = process.returncode
    return _outcome(watch, stopped, 128 - code if code < 0 else code, limits)


def _outcome(watch: Watch, stopped: Stopped | None, code: int | None, limits: SandboxLimits) -> SandboxRun:
    printed = watch.printed[: limits.output_bytes].decode("utf-8", "replace")
    return SandboxRun(printed, code if stopped is None else None, stopped, limits)
