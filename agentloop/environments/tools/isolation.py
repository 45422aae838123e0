"""Runs a tool in a forked process with its own session, and kills its whole process group afterwards.

Only the calling thread survives in the child, so a tool must not use torch. This contains accidents, not attacks.
"""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple

from agentloop.environments.tools.results import CRASHED, ToolResult, failure
from agentloop.errors import NotJudged, ToolTimeout, WrongObservation, shortened

# JSON writes a character in at most 6 bytes (\u0000); the margin is for the frame around the text.
_BYTES_PER_CHARACTER, _MARGIN_BYTES = 6, 8192
_LONGEST_POLL_MS = 60_000


def run_isolated(call: Callable[[], ToolResult], *, timeout_s: float, max_chars: int) -> ToolResult:
    """Run `call` in a child process, whose death is an observation. Raises ToolTimeout, or as the call."""
    deadline = time.monotonic() + timeout_s
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_child(call, writing)
    os.close(writing)
    try:
        line = _read_line(reading, deadline, most=_BYTES_PER_CHARACTER * max_chars + _MARGIN_BYTES)
    finally:
        os.close(reading)
        code = _end(child)
    try:
        said = json.loads(line)
    except ValueError:
        ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return failure(CRASHED, f"the tool's process ended without a result ({ended})")
    if isinstance(said, dict):
        raise (NotJudged if said["not_judged"] else WrongObservation)(said["text"])
    return ToolResult(*said)


def _be_the_child(call: Callable[[], ToolResult], writing: int) -> None:
    """Run the call as the child process, and never return: the child must not become a second trainer."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        # The inherited streams may be locked, or hold text that another thread was about to write.
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            said: object = astuple(call())
        except (NotJudged, WrongObservation) as error:
            said = {"not_judged": isinstance(error, NotJudged), "text": shortened(str(error))}
        with open(writing, "wb") as pipe:
            pipe.write(json.dumps(said).encode() + b"\n")
    finally:
        os._exit(0)


def _read_line(fd: int, deadline: float, *, most: int) -> bytes:
    """Read until a line or the child ends. A line is enough, because a grandchild may hold the pipe open."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    received = bytearray()
    while not received.endswith(b"\n") and len(received) <= most:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ToolTimeout
        if poll.poll(min(left_s * 1000, _LONGEST_POLL_MS)):
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                break
            received += chunk
    return bytes(received)


def _end(child: int) -> int:
    """Kill the child and its process group, then reap the child, which frees the group's id; return the exit code."""
    for kill in (os.killpg, os.kill):
        # The child may be dead, or lead no group yet. macOS raises PermissionError for a group of zombies.
        with suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
