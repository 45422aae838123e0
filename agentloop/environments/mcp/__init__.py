"""Tools of MCP servers: listed when a run starts, called by its episodes, ended with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from agentloop.config.sections.environments import McpServerSection
from agentloop.errors import UserError

if TYPE_CHECKING:
    from agentloop.environments.mcp.attached import McpServers


def list_servers(sections: Mapping[str, McpServerSection]) -> McpServers:
    """The servers, asked for their tools. Raises UserError for one that does not answer, or without the extra."""
    # Here, for it takes a second and a half.
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"environment.mcp_servers must be empty without the MCP SDK, got {', '.join(sections)}. "
            "Install it: pip install 'agentloop-replay[mcp]'."
        ) from error
    from agentloop.environments.mcp.attached import McpServers

    return McpServers(sections)
