"""What MCP servers offer, as tools of an environment: names, schemas, and arguments that fit them."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from jsonschema.exceptions import SchemaError, best_match
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, validator_for
from mcp.types import Tool
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import AfterValidator, TypeAdapter
from pydantic_core import PydanticCustomError

from agentloop.config.sections.rollout import McpServerSection
from agentloop.environments.mcp.connection import Connection
from agentloop.environments.tools.tool_schema import SCHEMA_ERROR
from agentloop.errors import UserError, one_line, shortened
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
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise UserError(f"{where} must have a schema that is whole, got a reference to {reference!r}.")
    kind: type[Validator] = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise UserError(f"{where} must have a JSON schema, got {one_line(error)}. Leave it out.") from error
    # Docstrings come with the indentation of their source.
    description = inspect.cleandoc(tool.description or tool.title or "")
    function = {"name": name, "description": description, "parameters": schema}
    check = AfterValidator(_Fitting(kind(schema)))
    arguments: TypeAdapter[dict[str, Any]] = TypeAdapter(Annotated[dict[str, Any], check])
    return ServerTool(name, tool.name, {"type": "function", "function": function}, arguments)


def _references(part: Any) -> Iterator[str]:
    if isinstance(part, Mapping):
        for name, value in part.items():
            if name in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            yield from _references(value)
    elif isinstance(part, list):
        for value in part:
            yield from _references(value)


class _Fitting:
    """Arguments that fit a JSON schema."""

    def __init__(self, validator: Validator) -> None:
        self._validator = validator

    def __call__(self, arguments: dict[str, Any]) -> dict[str, Any]:
        error = best_match(self._validator.iter_errors(arguments))
        if error is not None:
            where = ".".join(map(str, error.absolute_path))
            problem = f"argument {where!r}: {error.message}" if where else error.message
            raise PydanticCustomError(SCHEMA_ERROR, "{problem}", {"problem": shortened(problem)})
        return arguments
