"""What the configuration says about one MCP server."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from replay.setting_types import PositiveFloat, Section


class McpServerSection(Section):
    """One MCP server: a program that is started for each episode, or an address that episodes share."""

    command: tuple[str, ...] = Field((), description="Program and arguments: started for each episode, ended with it.")
    env: dict[str, str] = Field(
        default_factory=dict, description="Variables of the program's environment; they are stored with the run."
    )
    pass_env: tuple[str, ...] = Field(
        (), description="Names of variables of this process that the program is given; their values are not stored."
    )
    url: str | None = Field(
        None, pattern="^https?://[^@]+$", description="Streamable HTTP endpoint of a server that runs."
    )
    token_env: str | None = Field(None, description="Variable that holds the bearer token for url; it is not stored.")
    tools: tuple[str, ...] | None = Field(None, description="Tools to offer; null: all that the server lists.")
    start_timeout_s: PositiveFloat = Field(60.0, description="Seconds until it has answered for the first time.")

    @model_validator(mode="after")
    def _one_way_to_it(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError("must have either command or url")
        unused = ("token_env",) if self.command else ("env", "pass_env")
        for name in unused:
            if getattr(self, name):
                raise ValueError(f"must not have {name}, which belongs to {'url' if self.command else 'command'}")
        return self
