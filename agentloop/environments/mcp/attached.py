"""Attaches MCP servers to an environment: their tools become its tools, and each instance gets its own servers."""

import asyncio
import inspect
import json
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from mcp import MCPError
from mcp.types import CallToolResult, ContentBlock, TextContent, Tool

from agentloop.config.sections.environments import McpServerSection
from agentloop.environments.environment import Environment
from agentloop.environments.mcp.connection import Connection
from agentloop.environments.mcp.transports import submit
from agentloop.environments.tools.results import ToolFailed
from agentloop.environments.tools.tool_schema import ToolSpec, arguments_of, tools_of, with_tools
from agentloop.errors import UserError, one_line
from context.messages import content_hash
from context.wording import suggest

_CONNECTIONS = "_agentloop_mcp_connections"
_UNUSUAL = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST_NAME = 64


class ListedServer(NamedTuple):
    name: str
    section: McpServerSection
    tools: tuple[ToolSpec, ...]


async def list_server(name: str, section: McpServerSection) -> ListedServer:
    """Start or find a server and list its tools. Raises UserError."""
    where = f"environment.mcp_servers.{name}"
    for variable in (*section.pass_env, *([section.token_env] if section.token_env else [])):
        if variable not in os.environ:
            key = "token_env" if variable == section.token_env else "pass_env"
            raise UserError(f"{where}.{key} must name variables that are set, got {variable!r}. Set it, or remove it.")
    connection = Connection(name, section)
    try:
        await connection.open()
        found = await connection.tools()
    except Exception as error:
        problem = connection.problem if not connection.is_open else one_line(error)
        shown = section.url or " ".join(section.command)
        raise UserError(
            f"{where} must be a server that lists its tools, got {shown!r} with: {problem}. Try it by hand."
        ) from error
    finally:
        await connection.close()
    names = [tool.name for tool in found]
    wanted = names if section.tools is None else section.tools
    for tool in wanted:
        if tool not in names:
            raise UserError(f"{where}.tools must be names of its tools, got {tool!r}. {suggest(tool, names)}")
    chosen = [_server_tool(name, tool, f"{where}: the tool {tool.name!r}") for tool in found if tool.name in wanted]
    return ListedServer(name, section, tuple(chosen))


def _server_tool(server: str, tool: Tool, where: str) -> ToolSpec:
    """Describe a server's tool under its own name, with `_` for characters that templates may not know."""
    name = _UNUSUAL.sub("_", tool.name)
    if not 0 < len(name) <= _LONGEST_NAME:
        raise UserError(f"{where} must have a name of 1 to {_LONGEST_NAME} characters, got {len(name)}. Leave it out.")
    schema = {"properties": {}, "required": [], **tool.input_schema}
    # A description may be a docstring with the indentation of its source.
    description = inspect.cleandoc(tool.description or tool.title or "")
    function = {"name": name, "description": description, "parameters": schema}
    shown = {"type": "function", "function": function}
    return ToolSpec(name, shown, False, arguments_of(schema, where), _calling(server, tool.name))


class McpServers:
    def __init__(self, sections: Mapping[str, McpServerSection]) -> None:
        """Starts or finds each server once and lists its tools. Raises UserError."""
        listing = (list_server(name, section) for name, section in sections.items())
        self._listed: list[ListedServer] = submit(_together(listing)).result()

    def digest(self, source: str) -> str:
        """Digest an environment's source with the servers' tools: a changed tool makes another environment."""
        offered = [[server.name, [tool.schema for tool in server.tools]] for server in self._listed]
        return content_hash([source, offered])

    def attached_to(self, environment: type[Environment], where: str) -> type[Environment]:
        """Make a class with the servers' tools besides its own. Raises UserError where two tools share a name."""
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
                specs[tool.name] = tool
        return with_tools(environment, specs)

    @contextmanager
    def connected(self, environment: Environment) -> Iterator[Future[Any]]:
        """Connect the instance to servers of its own, until the block ends. The yielded future waits for them."""
        named = {server.name: Connection(server.name, server.section) for server in self._listed}
        object.__setattr__(environment, _CONNECTIONS, named)  # the class may be a frozen dataclass
        try:
            yield submit(_together(one.open() for one in named.values()))
        finally:
            submit(_together(one.close() for one in named.values()))  # nobody waits, as a program may be slow to end


async def _together(work: Iterable[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*work)


def _calling(server: str, tool: str) -> Callable[..., Any]:

    async def call(environment: Environment, /, **arguments: Any) -> str:
        connection: Connection = getattr(environment, _CONNECTIONS)[server]
        try:
            result = await asyncio.wrap_future(submit(connection.call(tool, arguments)))
        except MCPError as error:
            raise ToolFailed(error.message) from error
        if result.is_error:
            raise ToolFailed(answer_text(result))
        return answer_text(result)

    return call


def answer_text(result: CallToolResult) -> str:
    """Write an answer as text, with a line for each part that is no text; structure without text becomes JSON."""
    parts = [_block_text(block) for block in result.content]
    if not any(isinstance(block, TextContent) for block in result.content) and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def _block_text(block: ContentBlock) -> str:
    text = getattr(getattr(block, "resource", block), "text", None)
    return text if isinstance(text, str) else f"[{block.type} left out]"
