"""Starts bubblewrap, learns which process is the first one inside, and lets it begin only then."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO

from agentloop.environments.sandbox import bubblewrap
from agentloop.environments.sandbox.bubblewrap import Descriptors, Interpreter
from agentloop.environments.sandbox.sandbox_run import SandboxFailed, SandboxLimits
from agentloop.environments.sandbox.watched_process import ProcessNamespace, start, wait_readable

_CHUNK = 4096
_LATEST_START_S = 60.0
"""On a machine that has a great deal to do."""


class StartedSandbox:
    """A process of bubblewrap's, and the namespace that it has made."""

    def __init__(self, process: subprocess.Popen[bytes], output: FileIO, status: FileIO) -> None:
        """Raises SandboxFailed where no namespace comes of it."""
        self.process = process
        self.output = output
        self._status = status
        self._said = b""
        try:
            self.namespace = ProcessNamespace(self._first_process())
        except ProcessLookupError:  # it has failed already
            raise self._failed() from None

    def exit_code(self) -> int | None:
        """Of the program, once all is over; None where it never ran."""
        while chunk := self._status.read(_CHUNK):
            self._said += chunk
        said = [json.loads(line) for line in self._said.splitlines()]
        return next((int(line["exit-code"]) for line in said if "exit-code" in line), None)

    def _first_process(self) -> int:
        deadline = time.monotonic() + _LATEST_START_S
        while b"\n" not in self._said:
            chunk = wait_readable(self._status.fileno(), deadline - time.monotonic()) and self._status.read(_CHUNK)
            if not chunk:
                raise self._failed()
            self._said += chunk
        return int(json.loads(self._said.splitlines()[0])["child-pid"])

    def _failed(self) -> SandboxFailed:
        """What bubblewrap complained of. It is dead then."""
        self.process.kill()
        self.process.wait()
        said = (self.output.read(_CHUNK) or b"").decode("utf-8", "replace")
        complaint = " ".join(said.split()) or f"exit code {self.process.returncode} without a word"
        return SandboxFailed(f"bubblewrap must begin, got {complaint}")


@contextmanager
def started(program: str, limits: SandboxLimits, interpreter: Interpreter) -> Iterator[StartedSandbox]:
    """A sandbox that has just begun. Raises SandboxFailed where it can't."""
    with (
        pipe() as (output, output_end),
        pipe() as (status, status_end),
        pipe() as (begin_end, begin),
        memory_file(program.encode("utf-8", "surrogatepass")) as code,
        memory_file(bubblewrap.seccomp_filter()) as seccomp,
    ):
        files = Descriptors(code.fileno(), seccomp.fileno(), status_end.fileno(), begin_end.fileno())
        words = bubblewrap.command(interpreter, limits, files)
        process = start(words, output=output_end.fileno(), pass_fds=files.all())
        for end in (output_end, status_end, begin_end):
            end.close()
        sandbox = StartedSandbox(process, output, status)
        # Its first process can't have been replaced by another one of this number: it waits for this byte.
        with suppress(BrokenPipeError):  # it has failed meanwhile, which its missing exit code says
            begin.write(b"1")
        yield sandbox


@contextmanager
def pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """The end to read from, and the end to write to."""
    reading, writing = os.pipe()
    with FileIO(reading, "rb") as read_end, FileIO(writing, "wb") as write_end:
        yield read_end, write_end


@contextmanager
def memory_file(contents: bytes) -> Iterator[FileIO]:
    """A file without a name, to be read from its beginning."""
    with FileIO(os.memfd_create("agentloop"), "r+b") as file:
        left = memoryview(contents)
        while left:
            left = left[file.write(left) :]
        file.seek(0)
        yield file
