"""Carries messages through a program's pipes or over HTTP, on one event loop for the servers of all episodes."""

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, TextIO, TypeVar

import httpx2
from mcp import StdioServerParameters, stdio_client
from mcp.client import Transport
from mcp.client.streamable_http import streamable_http_client

from agentloop.environments.program_tree import ending_all
from agentloop.errors import shortened

_CONNECT_S = 30.0
_MOST_BYTES = 1 << 30
"""Bytes of the longest message over HTTP."""
_INHERITED = ("LANG", "LC_ALL", "TMPDIR", "TZ")
"""Variables that a program sees besides those that the SDK passes on: HOME, LOGNAME, PATH, SHELL, TERM and USER."""
_LAST_LINES, _LAST_CHARACTERS = 5, 4096
# Many programs print other text than messages to their standard output, and the SDK would log each such line.
logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)

_Result = TypeVar("_Result")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop


def submit(coroutine: Coroutine[Any, Any, _Result]) -> Future[_Result]:
    """Run a coroutine on the event loop of the servers. Cancelling the future cancels the coroutine."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())


def through_pipes(command: Sequence[str], env: Mapping[str, str], errors: TextIO) -> Transport:
    """Return the SDK's transport that starts and ends a program. Its standard error goes to a file.

    Raises OSError if the program does not exist.
    """
    known = {name: os.environ[name] for name in _INHERITED if name in os.environ} | dict(env)
    if shutil.which(command[0], path=known.get("PATH")) is None:
        raise FileNotFoundError(f"there is no program {command[0]!r}")
    program, *arguments = ending_all(command)
    return stdio_client(
        StdioServerParameters(command=program, args=arguments, env=known, encoding_error_handler="replace"), errors
    )


def last_lines(errors: TextIO) -> str:
    """Read the last lines that a program wrote to its standard error, on one line."""
    errors.seek(0)
    lines = [line for line in errors.read()[-_LAST_CHARACTERS:].splitlines() if line.strip()]
    return shortened(" / ".join(lines[-_LAST_LINES:]))


@asynccontextmanager
async def over_http(url: str, headers: Mapping[str, str]) -> AsyncIterator[Transport]:
    """Yield the SDK's HTTP transport."""
    timeout = httpx2.Timeout(_CONNECT_S, read=None)  # each tool call has a deadline of its own
    async with httpx2.AsyncClient(headers=headers, timeout=timeout) as client:
        yield streamable_http_client(url, http_client=client, max_sse_event_size=_MOST_BYTES)
