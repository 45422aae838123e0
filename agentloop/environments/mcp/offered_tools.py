"""What MCP servers offer, as tools of an environment: names, schemas, and arguments that fit them."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcp.types import Tool
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import TypeAdapter

from agentloop.config.sections.environments.mcp_server import McpServerSection
from agentloop.environments.mcp.connection import Connection
from agentloop.environments.tools.json_schema import arguments_of
from agentloop.errors import UserError, one_line
from context.wording import suggest

_UNUSUAL = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST_NAME = 64


@dataclass(frozen=True)
class ServerTool:
    name: str
    """What the policy is shown: the server's own name, with `_` for what templates and parsers may not know."""
    own_name: str
    schema: Mapping[str, Any]
    """As chat templates expect it: {"type": "function", "function": {...}}."""
    arguments: TypeAdapter[dict[str, Any]]


@dataclass(frozen=True)
class ListedServer:
    """A server that has been asked what it offers."""

    name: str
    section: McpServerSection
    tools: tuple[ServerTool, ...]
    handshake: str

    def connection(self) -> Connection:
        return Connection(self.section, handshake=self.handshake)


async def list_server(name: str, section: McpServerSection) -> ListedServer:
    """Start it or find it, and ask for its tools. Raises UserError."""
    where = f"environment.mcp_servers.{name}"
    for variable in (*section.pass_env, *([section.token_env] if section.token_env else [])):
        if variable not in os.environ:
            key = "token_env" if variable == section.token_env else "pass_env"
            raise UserError(f"{where}.{key} must name variables that are set, got {variable!r}. Set it, or remove it.")
    connection = Connection(section)
    try:
        await connection.open()
        found = await connection.tools()
        version = connection.protocol_version
    except Exception as error:
        problem = connection.problem if not connection.is_open else one_line(error)
        shown = section.url or " ".join(section.command)
        raise UserError(
            f"{where} must be a server that lists its tools, got {shown!r} with: {problem}. Try it by hand."
        ) from error
    finally:
        await connection.close()
    chosen = _chosen(found, section, where)
    tools = tuple(_server_tool(tool, f"{where}: the tool {tool.name!r}") for tool in chosen)
    return ListedServer(name, section, tools, "auto" if version in MODERN_PROTOCOL_VERSIONS else "legacy")


def _chosen(found: list[Tool], section: McpServerSection, where: str) -> list[Tool]:
    names = [tool.name for tool in found]
    if section.tools is None:
        return found
    for name in section.tools:
        if name not in names:
            raise UserError(f"{where}.tools must be names of its tools, got {name!r}. {suggest(name, names)}")
    return [tool for tool in found if tool.name in section.tools]


def _server_tool(tool: Tool, where: str) -> ServerTool:
    name = _UNUSUAL.sub("_", tool.name)
    if not 0 < len(name) <= _LONGEST_NAME:
        raise UserError(f"{where} must have a name of 1 to {_LONGEST_NAME} characters, got {len(name)}. Leave it out.")
    schema = {"properties": {}, "required": [], **tool.input_schema}
    # Docstrings come with the indentation of their source.
    description = inspect.cleandoc(tool.description or tool.title or "")
    function = {"name": name, "description": description, "parameters": schema}
    arguments = arguments_of(schema, where)
    return ServerTool(name, tool.name, {"type": "function", "function": function}, arguments)
