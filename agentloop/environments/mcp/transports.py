"""How messages come and go: through a program's pipes or over HTTP, none of them longer than a bound.

The SDK's own transport of programs has no bound, and leaves what a program started.
"""

import asyncio
import atexit
import os
import shutil
import signal
import sys
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

from agentloop.errors import shortened

_MOST_BYTES = 8 << 20
"""Longest message that is read."""
_TOO_LONG = f"the answer was longer than {_MOST_BYTES >> 20} MB and was left out"
_CONNECT_S = 30.0
_Received = SessionMessage | Exception
_INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
_GRACE_S = 2.0
_POLL_S = 0.01
_STDERR_LINES, _STDERR_BYTES = 5, 4096
# The kernel ends the program when this process is gone, however it went. Not `preexec_fn`: Python code between fork and
# exec may wait for ever for a lock that another thread held.
ENDS_WITH_PARENT = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class ServerProgram:
    """One process with its group. Lives on the event loop of the servers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._stderr = b""
        """The end of what it wrote there."""
        self._listening = asyncio.create_task(self._listen())
        self._ending: asyncio.Task[None] | None = None
        _RUNNING.add(self)

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str]) -> Self:
        """Raises OSError where there is no such program."""
        whole = {name: os.environ[name] for name in _INHERITED if name in os.environ} | dict(env)
        if shutil.which(command[0], path=whole.get("PATH")) is None:
            raise FileNotFoundError(f"there is no program {command[0]!r}")
        before = [sys.executable, "-I", "-S", "-c", ENDS_WITH_PARENT, str(os.getpid())]
        process = await asyncio.create_subprocess_exec(
            *(before if sys.platform == "linux" else ()),
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=whole,
            start_new_session=True,
            limit=_MOST_BYTES,
        )
        return cls(process)

    async def read(self) -> AsyncIterator[bytes | None]:
        """The program's lines until it ends; None for one that was too long."""
        stdout, skipping = self._process.stdout, False
        assert stdout is not None
        while True:
            try:
                line = await stdout.readuntil(b"\n")
            except asyncio.LimitOverrunError as long:
                await stdout.readexactly(long.consumed)
                if not skipping:
                    yield None
                skipping = True
            except asyncio.IncompleteReadError:
                return
            else:
                if not skipping:
                    yield line
                skipping = False

    async def write(self, line: bytes) -> None:
        """Raises OSError when it is gone."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(line + b"\n")
        await stdin.drain()

    @property
    def last_words(self) -> str:
        """How it ended, and the end of what it wrote to stderr."""
        code = self._process.returncode
        ended = "it runs" if code is None else f"exit code {code}" if code >= 0 else f"signal {-code}"
        said = [line for line in self._stderr.decode(errors="replace").splitlines() if line.strip()]
        return shortened(f"{ended}; {' / '.join(said[-_STDERR_LINES:])}" if said else ended)

    async def end(self) -> None:
        """Close its input, wait, and kill what is left of its group, whether or not who waits is cancelled."""
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
        # Also when it has ended by itself: what it started must not outlive it.
        self._signal(signal.SIGKILL)
        await self._ended_within(_GRACE_S)
        self._listening.cancel()
        # Else open for as long as something that left the group has a pipe of it.
        process._transport.close()  # type: ignore[attr-defined]
        _RUNNING.discard(self)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # gone; macOS says the other of a group of zombies
            os.killpg(self._process.pid, number)

    async def _ended_within(self, seconds: float) -> bool:
        """Not by `wait()`, which also waits for whoever else has its pipes."""
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
    """Run it there. Cancelling the future cancels it."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())


@asynccontextmanager
async def through_pipes(program: ServerProgram) -> AsyncIterator[Any]:
    """The SDK's streams of a program that runs."""
    incoming, received = anyio.create_memory_object_stream[_Received](0)
    sent, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    waiting: set[types.RequestId] = set()

    async def read() -> None:
        async with incoming:
            async for line in program.read():
                for message in _read(line, waiting):
                    await incoming.send(SessionMessage(message))

    async def write() -> None:
        async with outgoing:
            async for message in outgoing:
                if isinstance(message.message, types.JSONRPCRequest):
                    waiting.add(message.message.id)
                await program.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode())

    async def ending_in_silence(work: Any) -> None:
        # Whoever waits for an answer is answered by the end of `incoming`.
        with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await work()

    tasks = [asyncio.create_task(ending_in_silence(work)) for work in (read, write)]
    try:
        yield received, sent
    finally:
        for task in tasks:
            task.cancel()
        for stream in (incoming, received, sent, outgoing):
            stream.close()


def _read(line: bytes | None, waiting: set[types.RequestId]) -> list[types.JSONRPCMessage]:
    """The message of a line, none of one that is no message; an error for all that wait if it was too long."""
    if line is None:
        error = types.ErrorData(code=-32050, message=_TOO_LONG)
        failed: list[types.JSONRPCMessage] = [types.JSONRPCError(jsonrpc="2.0", id=id, error=error) for id in waiting]
        waiting.clear()
        return failed
    try:
        message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        return []  # many programs print to their standard output what they should not
    if isinstance(message, types.JSONRPCResponse | types.JSONRPCError) and message.id is not None:
        waiting.discard(message.id)
    return [message]


@asynccontextmanager
async def over_http(url: str, headers: Mapping[str, str]) -> AsyncIterator[Transport]:
    """The SDK's transport, with bodies that end."""
    timeout = httpx2.Timeout(_CONNECT_S, read=None)  # whoever asks has a deadline
    async with httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks={"response": [_bound]}) as client:
        yield streamable_http_client(url, http_client=client, max_sse_event_size=_MOST_BYTES)


async def _bound(response: httpx2.Response) -> None:
    # Of a stream of events, the SDK bounds each.
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Bounded(response.stream)


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for chunk in self._stream:
            read += len(chunk)
            if read > _MOST_BYTES:
                raise httpx2.StreamError(_TOO_LONG)
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
