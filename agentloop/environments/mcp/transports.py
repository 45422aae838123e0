"""Carries messages through a program's pipes or over HTTP.

The SDK's own transport for programs leaves a program's children running.
"""

import asyncio
import atexit
import os
import shutil
import signal
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any, Self, TypeVar

import anyio
import httpx2
import mcp_types as types
from mcp.client import Transport
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from agentloop.errors import shortened

_MOST_BYTES = 1 << 30
"""Bytes of the longest message that is read; a longer one ends the connection."""
_CONNECT_S = 30.0
_Received = SessionMessage | Exception
_INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
_GRACE_S = 2.0
_POLL_S = 0.01
_STDERR_LINES, _STDERR_BYTES = 5, 4096


class ServerProgram:
    """A server's process with its group, on the event loop of the servers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._stderr = b""
        """The last bytes that the program wrote to stderr."""
        self._listening = asyncio.create_task(self._listen())
        self._ending: asyncio.Task[None] | None = None
        _RUNNING.add(self)

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str]) -> Self:
        """Start a program. Raises OSError if it does not exist."""
        whole = {name: os.environ[name] for name in _INHERITED if name in os.environ} | dict(env)
        if shutil.which(command[0], path=whole.get("PATH")) is None:
            raise FileNotFoundError(f"there is no program {command[0]!r}")
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=whole,
            start_new_session=True,
            limit=_MOST_BYTES,
        )
        return cls(process)

    async def read(self) -> AsyncIterator[bytes]:
        """Yield the program's lines until it ends. Raises ValueError for a line that is too long."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            yield line

    async def write(self, line: bytes) -> None:
        """Write a line to the program. Raises OSError if the program has ended."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(line + b"\n")
        await stdin.drain()

    @property
    def last_words(self) -> str:
        """How the program ended, and its last lines on stderr."""
        code = self._process.returncode
        ended = "it runs" if code is None else f"exit code {code}" if code >= 0 else f"signal {-code}"
        said = [line for line in self._stderr.decode(errors="replace").splitlines() if line.strip()]
        return shortened(f"{ended}; {' / '.join(said[-_STDERR_LINES:])}" if said else ended)

    async def end(self) -> None:
        """Close the program's input, wait, and kill its group; a cancelled caller does not stop this."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        process = self._process
        assert process.stdin is not None
        process.stdin.close()
        if not await self._ended_within(_GRACE_S):
            self._signal(signal.SIGTERM)
            await self._ended_within(_GRACE_S)
        # The group is killed even if the program has ended, because its children must not outlive it.
        self._signal(signal.SIGKILL)
        await self._ended_within(_GRACE_S)
        self._listening.cancel()
        # Otherwise the transport stays open while a process outside of the group holds a pipe.
        process._transport.close()  # type: ignore[attr-defined]
        _RUNNING.discard(self)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # no such group; macOS: a group of zombies
            os.killpg(self._process.pid, number)

    async def _ended_within(self, seconds: float) -> bool:
        """True if the process ends in time. `wait()` would also wait for other processes that hold its pipes."""
        deadline = time.monotonic() + seconds
        while self._process.returncode is None:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(_STDERR_BYTES):
            self._stderr = (self._stderr + chunk)[-_STDERR_BYTES:]


_RUNNING: set[ServerProgram] = set()


@atexit.register
def _end_before_exit() -> None:
    async def end_all() -> None:
        await asyncio.gather(*(program.end() for program in list(_RUNNING)))

    if _RUNNING:
        submit(end_all()).result(4 * _GRACE_S)


_Result = TypeVar("_Result")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop


def submit(coroutine: Coroutine[Any, Any, _Result]) -> Future[_Result]:
    """Run a coroutine on the event loop of the servers. Cancelling the future cancels the coroutine."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())


@asynccontextmanager
async def through_pipes(program: ServerProgram) -> AsyncIterator[Any]:
    """Yield the SDK's message streams to and from a running program."""
    incoming, received = anyio.create_memory_object_stream[_Received](0)
    sent, outgoing = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        async with incoming:
            async for line in program.read():
                with suppress(ValidationError):  # many programs print other text to their standard output
                    message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                    await incoming.send(SessionMessage(message))

    async def write() -> None:
        async with outgoing:
            async for message in outgoing:
                await program.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode())

    async def ending_in_silence(work: Any) -> None:
        # A caller that waits for an answer notices the end of `incoming`.
        with suppress(OSError, ValueError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await work()

    tasks = [asyncio.create_task(ending_in_silence(work)) for work in (read, write)]
    try:
        yield received, sent
    finally:
        for task in tasks:
            task.cancel()
        for stream in (incoming, received, sent, outgoing):
            stream.close()


@asynccontextmanager
async def over_http(url: str, headers: Mapping[str, str]) -> AsyncIterator[Transport]:
    """Yield the SDK's HTTP transport."""
    timeout = httpx2.Timeout(_CONNECT_S, read=None)  # each tool call has a deadline of its own
    async with httpx2.AsyncClient(headers=headers, timeout=timeout) as client:
        yield streamable_http_client(url, http_client=client, max_sse_event_size=_MOST_BYTES)
