"""Connects one episode to one MCP server. All methods run on the event loop of the servers."""

import asyncio
import os
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, TextIO

import anyio
from mcp import Client, MCPError
from mcp.types import CONNECTION_CLOSED, CallToolResult, Tool

from agentloop.config.sections.environments import McpServerSection
from agentloop.environments.mcp.transports import last_lines, over_http, through_pipes
from agentloop.environments.tools.results import CRASHED, ToolFailed
from agentloop.errors import one_line

_STARTS = asyncio.Semaphore(os.cpu_count() or 1)
"""Limits the programs that start at once, so that each has the CPU to answer within its time."""
_TO_CLOSE_S = 10.0
_MOST_PAGES = 100
_ENDED = "it has ended"
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError)


class Connection:
    def __init__(self, name: str, section: McpServerSection) -> None:
        self._name, self._section = name, section
        self._client: Client | None = None
        self._holding: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self.problem = "it was not started"

    @property
    def is_open(self) -> bool:
        return self._client is not None

    async def open(self) -> None:
        """Open the connection. A failure is not raised: `problem` says why, and later calls fail."""
        opened, self._closing = asyncio.Event(), asyncio.Event()
        async with _STARTS:
            self._holding = asyncio.create_task(self._hold(opened))
            waiting = asyncio.create_task(opened.wait())
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait({self._holding, waiting}, timeout=self._section.start_timeout_s, return_when=first)
            waiting.cancel()
        if not opened.is_set() and not self._holding.done():
            self._holding.cancel()
            await asyncio.wait({self._holding})
            said = "" if self.problem == _ENDED else f" ({self.problem})"
            self.problem = f"no answer within start_timeout_s={self._section.start_timeout_s:g} s{said}"

    async def tools(self) -> list[Tool]:
        found: list[Tool] = []
        cursor: str | None = None
        for _ in range(_MOST_PAGES):
            page = await self._ask(self._open_client().list_tools(cursor=cursor))
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        return found

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Call a tool. Raises ToolFailed if the server has ended, and the SDK's errors for a bad answer."""
        if self._client is None and self._section.url is not None:
            await self.open()  # a shared server may have come back
        result: CallToolResult = await self._ask(self._open_client().call_tool(tool, dict(arguments)))
        return result

    async def close(self) -> None:
        """Close the connection, and end the server's program."""
        self._closing.set()
        if self._holding is not None:
            await asyncio.wait({self._holding}, timeout=_TO_CLOSE_S)
            self._holding.cancel()

    def _open_client(self) -> Client:
        if self._client is None:
            raise self._gone()
        return self._client

    def _gone(self) -> ToolFailed:
        said = f"the server {self._name} has ended"
        return ToolFailed(said, kind=CRASHED, problem=f"{said}: {self.problem}")

    async def _ask(self, question: Any) -> Any:
        """Await the answer to a request; if the server ends meanwhile, the connection is closed."""
        assert self._holding is not None
        asking = asyncio.ensure_future(question)
        try:
            await asyncio.wait({asking, self._holding}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
        except _GONE:
            pass
        finally:
            asking.cancel()
        await self.close()
        raise self._gone()

    async def _hold(self, opened: asyncio.Event) -> None:
        """Hold the connection until it is closed or breaks, in a task of its own, because the SDK cancels its task."""
        self.problem = _ENDED
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            try:
                async with AsyncExitStack() as stack:
                    transport = await self._transport(stack, errors)
                    self._client = await stack.enter_async_context(Client(transport, cache=None))
                    opened.set()
                    await self._closing.wait()
            except Exception as error:  # noqa: BLE001  any error of the SDK becomes the `problem` of later calls
                self.problem = _innermost(error)
            finally:
                self._client = None
                self.problem = last_lines(errors) or self.problem

    async def _transport(self, stack: AsyncExitStack, errors: TextIO) -> Any:
        section = self._section
        if section.url is not None:
            token = {} if section.token_env is None else {"Authorization": f"Bearer {os.environ[section.token_env]}"}
            return await stack.enter_async_context(over_http(section.url, token))
        passed = {name: os.environ[name] for name in section.pass_env}
        return through_pipes(section.command, {**passed, **section.env}, errors)


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(error)
