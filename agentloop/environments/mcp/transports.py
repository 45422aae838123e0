"""How messages come and go: through a program's pipes or over HTTP, none of them longer than a bound."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import httpx2
import mcp_types as types
from mcp.client import Transport
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from agentloop.environments.mcp.server_program import MOST_BYTES, ServerProgram

_TOO_LONG = f"the answer was longer than {MOST_BYTES >> 20} MB and was left out"
_CONNECT_S = 30.0
_Received = SessionMessage | Exception


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
        yield streamable_http_client(url, http_client=client, max_sse_event_size=MOST_BYTES)


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
            if read > MOST_BYTES:
                raise httpx2.StreamError(_TOO_LONG)
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


def bearer(variable: str | None) -> dict[str, str]:
    """The header that a token of the environment makes. Raises KeyError where there is none."""
    return {} if variable is None else {"Authorization": f"Bearer {os.environ[variable]}"}
