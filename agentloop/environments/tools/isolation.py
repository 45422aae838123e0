"""Runs a tool in a forked process of its own session, and leaves none of its process group alive.

The child starts with everything this process knows and can change none of it; of its threads only the calling
one lives on, so the tool must not use torch. What it returns comes back through a pipe as one frame of bounded
length; its standard streams lead nowhere. A tool that starts a session of its own, or means harm, gets away:
this contains accidents, it is no sandbox.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable

from agentloop.environments.tools.results import ToolResult, failure
from agentloop.errors import ToolTimeout
from agentloop.user_code import ask_to_stop

CRASHED = "crashed"
_HEADER_BYTES = 8


# JSON writes a character in at most 6 bytes (\u0000); the rest is for the frame around the text.
_BYTES_PER_CHARACTER, _MARGIN_BYTES = 6, 8192
_LONGEST_POLL_MS = 60_000


def run_isolated(call: Callable[[], ToolResult], *, timeout_s: float, max_chars: int) -> ToolResult:
    """The result of `call`, run in a child process, whose death is an observation. Raises ToolTimeout."""
    deadline = time.monotonic() + timeout_s
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_child(call, writing)
    os.close(writing)
    try:
        frame = _read_frame(reading, deadline, most=_BYTES_PER_CHARACTER * max_chars + _MARGIN_BYTES)
    finally:
        os.close(reading)
        status = _end(child)
    if frame is None:
        return failure(CRASHED, f"the tool's process ended without a result ({_describe(status)})")
    return _decode(frame)


def _be_the_child(call: Callable[[], ToolResult], writing: int) -> None:
    """Never returns: this process must not become a second trainer."""
    try:
        os.setsid()
        ask_to_stop(False)  # a Ctrl-C of the terminal does not come here, so no failure is of its making
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        # New objects: the inherited ones may be locked or hold text that another thread was about to write.
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8", errors="replace")  # noqa: SIM115
        result = call()
        frame = json.dumps([result.content, result.error_kind, result.problem]).encode()
        _write_all(writing, len(frame).to_bytes(_HEADER_BYTES, "big") + frame)
    finally:
        os._exit(0)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_frame(fd: int, deadline: float, *, most: int) -> bytes | None:
    """One whole frame; None if the child ended or sent rubbish. A grandchild may keep the pipe open."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    received = bytearray()
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ToolTimeout
        if not poll.poll(min(left * 1000, _LONGEST_POLL_MS)):
            continue
        chunk = os.read(fd, 1 << 16)
        received += chunk
        expected = _HEADER_BYTES + int.from_bytes(received[:_HEADER_BYTES], "big")
        if len(received) == expected:
            return bytes(received[_HEADER_BYTES:])
        if not chunk or len(received) > most:
            return None


def _decode(frame: bytes) -> ToolResult:
    try:
        content, *rest = json.loads(frame)
        kind, problem = (None if text is None else str(text) for text in rest)
        return ToolResult(str(content), kind, problem)
    except (ValueError, TypeError):
        return failure(CRASHED, "the tool's process sent no readable result")


def _end(child: int) -> int:
    """Kill the child with its whole process group and reap it; the group's id can't be reused before that."""
    for kill in (os.killpg, os.kill):
        try:
            kill(child, signal.SIGKILL)
        except ProcessLookupError:
            pass  # not yet the leader of a group, or dead already
        except PermissionError:
            pass  # macOS says so of a group that holds only zombies
    return os.waitpid(child, 0)[1]


def _describe(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
