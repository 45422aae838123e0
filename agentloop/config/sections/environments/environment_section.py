"""What the configuration says about one environment."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from agentloop.config.sections.environments.mcp_server import McpServerSection
from agentloop.config.sections.environments.named_sections import read_sections
from replay.config import TaskPool
from replay.setting_types import Section


def _read_servers(values: Any) -> Any:
    return read_sections(values, "environment.mcp_servers", McpServerSection)


class EnvironmentSection(TaskPool, Section):
    name: str = Field(
        "lookup_chain",
        description="Built-in environment, or `path/to/file.py:ClassName` for one of your own. `rows` has no class: "
        "rows of tasks.data are its tasks, and reward.functions judge; see docs/environments.md.",
    )
    tools: tuple[str, ...] = Field(
        (), description="Functions that `rows` offers as tools, each `path/to/file.py:function`, def or async def."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the environment.")
    mcp_servers: Annotated[dict[str, McpServerSection], BeforeValidator(_read_servers)] = Field(
        default_factory=dict,
        description="MCP servers by name, whose tools are offered beside the environment's own; for example {notes: "
        "{command: [python, notes.py]}, search: {url: 'http://127.0.0.1:8000/mcp'}}. See docs/environments.md.",
    )

    @property
    def is_rows(self) -> bool:
        """Whether there is no class: reward functions then say what a success is."""
        return self.name == "rows"
