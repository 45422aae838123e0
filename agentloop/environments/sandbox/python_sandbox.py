"""Runs an unread Python program, in a sandbox or without one, and reports how it ended."""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from agentloop.environments.environment import Environment, tool
from agentloop.environments.sandbox.bubblewrap import SandboxFailed, SandboxLimits, contained, memory_group
from agentloop.errors import UserError

SandboxKind = Literal["bubblewrap", "none"]
Stopped = Literal["time", "memory", "output"]
_PROGRAM = "/code/main.py"
_TRIAL = SandboxLimits(seconds=20.0)
_LOOK_S = 0.02
_log = logging.getLogger(__name__)


class Interpreter(NamedTuple):
    """A Python with its standard library and without this project's packages."""

    executable: str
    prefix: str


@dataclass(frozen=True)
class SandboxRun:
    """How the run of a program ended."""

    output: str
    """The text of both output streams in order, cut at the limit."""
    exit_code: int | None
    """128 + signal where a signal ended the program; None where a limit did."""
    stopped: Stopped | None
    """The limit that ended the program; None: it ended by itself."""
    limits: SandboxLimits

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0

    def observation(self) -> str:
        """Write the run for the policy: the output, and after a failure how the program ended."""
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
    """Runs each program alone, with the standard library and two writable places, which vanish with it.

    With `none` nothing contains a program: it can do whatever the user can, and only time and output are limited.
    """

    def __init__(self, kind: SandboxKind = "bubblewrap", limits: SandboxLimits | None = None) -> None:
        """Raises UserError if bubblewrap can't contain a program here."""
        if kind not in ("bubblewrap", "none"):
            raise UserError(f"sandbox must be bubblewrap or none, got {kind!r}. Set one of them.")
        self.limits = limits or SandboxLimits()
        self._interpreter = usable_interpreter() if kind == "bubblewrap" else None

    def run(self, program: str) -> SandboxRun:
        """Run a program to its end or to a limit. Raises SandboxFailed if the sandbox can't be started."""
        if self._interpreter is None:
            return _run_uncontained(program, self.limits)
        return _run_contained(program, self.limits, self._interpreter)


class SandboxedPython(Environment):
    """Base class with the tool `run_python`; tasks and rewards may also run programs in `self.sandbox`."""

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
    """Find a Python that runs in a sandbox: this program's own without its virtual environment, or the system's.

    Raises UserError if none does.
    """
    problem = ""
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    for interpreter in (Interpreter(str(base), sys.base_prefix), Interpreter("/usr/bin/python3", "/usr")):
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
    reading, writing = os.pipe()
    with (
        memory_group(limits.memory_mb) as group,
        open(reading, encoding="utf-8") as status,
        tempfile.TemporaryFile() as output,
    ):
        with open(writing, "wb"), tempfile.TemporaryFile() as code:
            code.write(program.encode("utf-8", "surrogatepass"))
            code.seek(0)
            further = ["--ro-bind-data", str(code.fileno()), _PROGRAM, "--json-status-fd", str(writing)]
            inside = [interpreter.executable, "-I", _PROGRAM]
            words = contained(inside, limits, shown=[interpreter.prefix], further=further)
            words = words if group is None else group.entered(words)
            process = _begun(words, output, pass_fds=(code.fileno(), writing))
        try:
            stopped = _reached_limit(process, limits, output)
        finally:
            first = status.readline()
            if process.poll() is None:
                # When the first process of a namespace dies, the kernel kills all others before bubblewrap ends.
                with suppress(ProcessLookupError):
                    os.kill(json.loads(first)["child-pid"] if first else process.pid, signal.SIGKILL)
            process.wait()
        codes = [json.loads(line)["exit-code"] for line in status if "exit-code" in line]
        exceeded = group is not None and group.is_exceeded()
        run = _ended(output, limits, codes[0] if codes else None, "memory" if exceeded else stopped)
    if run.exit_code is None and run.stopped is None:
        raise SandboxFailed(f"bubblewrap must begin, got {' '.join(run.output.split()) or 'no word'}")
    return run


def _run_uncontained(program: str, limits: SandboxLimits) -> SandboxRun:
    """Run a program without a sandbox; at its end only the processes of its own group are killed."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        path = Path(folder, "main.py")
        path.write_text(program, encoding="utf-8", errors="surrogatepass")
        process = _begun([sys.executable, "-I", str(path)], output, folder=folder)
        try:
            stopped = _reached_limit(process, limits, output)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        return _ended(output, limits, 128 - code if code < 0 else code, stopped)


def _begun(
    words: Sequence[str], output: IO[bytes], *, pass_fds: Sequence[int] = (), folder: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own, without input, that writes both its streams into a file."""
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={},
        cwd=folder,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def _reached_limit(process: subprocess.Popen[bytes], limits: SandboxLimits, output: IO[bytes]) -> Stopped | None:
    """Wait until a process ends (None) or reaches its limit of time or output, and return that limit."""
    deadline = time.monotonic() + limits.seconds
    while (left_s := deadline - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(_LOOK_S, left_s))
            return None
        if os.fstat(output.fileno()).st_size > limits.output_bytes:
            return "output"
    return "time"


def _ended(output: IO[bytes], limits: SandboxLimits, exit_code: int | None, stopped: Stopped | None) -> SandboxRun:
    printed = os.pread(output.fileno(), limits.output_bytes + 1, 0)
    if len(printed) > limits.output_bytes and stopped is None:
        stopped = "output"
    text = printed[: limits.output_bytes].decode("utf-8", "replace")
    return SandboxRun(text, exit_code if stopped is None else None, stopped, limits)


# Calls one function many times in one sandbox. The sandbox never sees the expected results.

_HARNESS = """\
import json, os
results = os.fdopen(os.dup(1), "w")
nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(nowhere, 1)
os.dup2(nowhere, 2)
def answer(value, error=None):
    results.write(json.dumps([value, error]) + "\\n")
    results.flush()
def trying(act):
    try:
        answer(act())
    except BaseException as error:
        answer(None, type(error).__name__ + ": " + str(error)[:200])
function = None
def find():
    global function
    names = {"__name__": "answer"}
    exec(compile(CODE, "answer.py", "exec"), names)
    function = names[NAME]
trying(find)
for arguments in json.loads(CALLS):
    trying(lambda: function(*arguments))
os._exit(0)
"""


@dataclass(frozen=True)
class Returned:
    """The result of one call."""

    value: Any
    """The returned value as JSON, so a tuple is a list; None after an error."""
    error: str | None = None
    """The exception of the code, or the limit that ended it before this call was done."""

    def equals(self, expected: Any) -> bool:
        """True if the call returned this value of this type: 1 is neither 1.0 nor True."""
        return self.error is None and json.dumps(self.value, sort_keys=True) == json.dumps(expected, sort_keys=True)


def call_function(sandbox: PythonSandbox, code: str, name: str, calls: Sequence[Sequence[Any]]) -> tuple[Returned, ...]:
    """Call the function `name` of `code` with each call's arguments, in one program under one set of limits."""
    program = f"CODE = {code!r}\nNAME = {name!r}\nCALLS = {json.dumps([list(call) for call in calls])!r}\n{_HARNESS}"
    run = sandbox.run(program)
    answers = [answer for line in run.output.splitlines() if (answer := _read(line)) is not None]
    if answers and answers[0].error is not None:
        return (answers[0],) * len(calls)
    missing = Returned(None, run.observation().splitlines()[-1] if not run.succeeded else "it ended early")
    found = answers[1 : len(calls) + 1]
    return (*found, *[missing] * (len(calls) - len(found)))


def _read(line: str) -> Returned | None:
    """Read one result line of the harness; None for any other or incomplete line."""
    try:
        value, error = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    return Returned(value, None if error is None else str(error))
