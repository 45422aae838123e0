"""An environment class with the tools of MCP servers, and its instances with servers of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from mcp import MCPError
from mcp.types import (
    AudioContent,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
)

from agentloop.config.sections.environments.mcp_server import McpServerSection
from agentloop.environments.environment import Environment
from agentloop.environments.mcp.connection import Connection, ServerGone
from agentloop.environments.mcp.offered_tools import ListedServer, ServerTool, list_server
from agentloop.environments.mcp.server_program import submit
from agentloop.environments.tools.results import CRASHED, ToolFailed
from agentloop.environments.tools.tool_schema import ToolSpec, tools_of, with_tools
from agentloop.errors import UserError
from context.messages import content_hash

_OF_INSTANCE = "_agentloop_mcp_connections"


class McpServers:
    """The servers of a run's environment."""

    def __init__(self, listed: Sequence[ListedServer]) -> None:
        self._listed = listed

    @classmethod
    def asked(cls, sections: Mapping[str, McpServerSection]) -> McpServers:
        """Each is started or found once, and asked for its tools. Raises UserError."""
        return cls(submit(_list_all(sections)).result())

    def digest(self, source: str) -> str:
        """Of an environment's source with what they offer: a tool that changes is another environment."""
        return content_hash(
            [source, [[server.name, [tool.schema for tool in server.tools]] for server in self._listed]]
        )

    def attached_to(self, environment: type[Environment], where: str) -> type[Environment]:
        """The class with their tools beside its own. Raises UserError where two have one name."""
        owners = dict.fromkeys(tools_of(environment, where), where)
        specs = {}
        for server in self._listed:
            here = f"environment.mcp_servers.{server.name}"
            for tool in server.tools:
                if tool.name in owners:
                    raise UserError(
                        f"{here} must offer tools with names of their own, got {tool.name!r}, which is also one of "
                        f"{owners[tool.name]}. Name those to offer with {here}.tools."
                    )
                owners[tool.name] = here
                schema, call = tool.schema, _calling(server.name, tool)
                specs[tool.name] = ToolSpec(tool.name, schema, False, False, tool.arguments, call)
        return with_tools(environment, specs)

    @asynccontextmanager
    async def opened_for(self, environment: Environment) -> AsyncIterator[None]:
        """Connect this instance: programs are started for it, and ended with it."""
        connections = self._connections_of(environment)
        try:
            await asyncio.wrap_future(submit(_open_all(connections)))
            yield
        finally:
            submit(_close_all(connections))  # nobody waits for it: a program may take its time

    @contextmanager
    def opened_now_for(self, environment: Environment) -> Iterator[None]:
        """Connect this instance, likewise, where there is no event loop."""
        connections = self._connections_of(environment)
        try:
            submit(_open_all(connections)).result()
            yield
        finally:
            submit(_close_all(connections))

    def _connections_of(self, environment: Environment) -> list[Connection]:
        connections = {server.name: server.connection() for server in self._listed}
        object.__setattr__(environment, _OF_INSTANCE, connections)  # its class may be a frozen dataclass
        return list(connections.values())


async def _open_all(connections: Sequence[Connection]) -> None:
    await asyncio.gather(*(connection.open() for connection in connections))


async def _close_all(connections: Sequence[Connection]) -> None:
    await asyncio.gather(*(connection.close() for connection in connections))


async def _list_all(sections: Mapping[str, McpServerSection]) -> list[ListedServer]:
    return await asyncio.gather(*(list_server(name, section) for name, section in sections.items()))


def _calling(server: str, tool: ServerTool) -> Callable[..., Any]:
    """The tool as a method."""

    async def call(environment: Environment, /, **arguments: Any) -> str:
        connections: Mapping[str, Connection] = getattr(environment, _OF_INSTANCE, {})
        if server not in connections:
            raise ToolFailed(f"the server {server} is not connected", kind=CRASHED)
        try:
            result = await asyncio.wrap_future(submit(connections[server].call(tool.own_name, arguments)))
        except ServerGone as error:
            gone = f"the server {server} has ended"
            raise ToolFailed(gone, kind=CRASHED, problem=f"{gone}: {error}") from error
        except MCPError as error:
            raise ToolFailed(error.message) from error
        if result.is_error:
            raise ToolFailed(answer_text(result))
        return answer_text(result)

    return call


def answer_text(result: CallToolResult) -> str:
    """Its texts, one below the other, with a line for what is no text; what has structure alone, as JSON."""
    parts = [_block_text(block) for block in result.content]
    if not any(isinstance(block, TextContent) for block in result.content) and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def _block_text(block: ContentBlock) -> str:
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, ImageContent | AudioContent):
        return f"[{block.type} left out: {block.mime_type}]"
    if isinstance(block, EmbeddedResource):
        if isinstance(block.resource, TextResourceContents):
            return block.resource.text
        return f"[resource left out: {block.resource.uri}, {block.resource.mime_type or 'binary'}]"
    return f"[resource: {block.uri}]"
