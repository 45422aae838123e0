"""The sections `environment`, `environments` and `tasks`: the one or several environments of a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from agentloop.config.conflicts import check_default
from replay.config import TaskData, TaskPool
from replay.setting_types import PositiveFloat, Section

if TYPE_CHECKING:
    from agentloop.config.run_config import RunConfig

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class McpServerSection(Section):
    """One MCP server: a program that is started for each episode, or an address that episodes share."""

    command: tuple[str, ...] = Field((), description="Program and arguments: started for each episode, ended with it.")
    env: dict[str, str] = Field(default_factory=dict, description="Its environment variables, stored with the run.")
    pass_env: tuple[str, ...] = Field((), description="Variables of this process to pass on; values are not stored.")
    url: str | None = Field(None, pattern="^https?://[^@]+$", description="Streamable HTTP endpoint of a server.")
    token_env: str | None = Field(None, description="Variable that holds the bearer token for url; never stored.")
    tools: tuple[str, ...] | None = Field(None, description="Tools to offer; null: all that the server lists.")
    start_timeout_s: PositiveFloat = Field(60.0, description="Seconds until it has answered for the first time.")

    @model_validator(mode="after")
    def _one_way_to_it(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError(f"must have either command or url, got {'both' if self.command else 'neither'}")
        way, unused = ("url", ("token_env",)) if self.command else ("command", ("env", "pass_env"))
        given = [name for name in unused if getattr(self, name)]
        if given:
            raise ValueError(f"must not have {given[0]}, which belongs to {way}, got it")
        return self


class EnvironmentSection(TaskPool, Section):
    name: str = Field(
        "lookup_chain",
        description="Built-in environment, or `path/to/file.py:ClassName` for one of your own. `rows` has no class: "
        "rows of tasks.data are its tasks, and reward.functions judge; see docs/environments.md.",
    )
    tools: tuple[str, ...] = Field((), description="Functions that `rows` offers as tools: `path/to/file.py:name`.")
    respond: str | None = Field(
        None,
        description="Function by which `rows` answers a reply without calls: `path/to/file.py:name`, which takes the "
        "task and the messages. null: such a reply is the answer.",
    )
    call_tool: str | None = Field(
        None,
        description="Function that answers calls of tools that a row's column `tools` gives as schemas: it takes the "
        "task, the tool's name and the arguments.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the environment.")
    agent: str | None = Field(
        None,
        description="An agent that asks the policy at a base URL: a command, or `path/to/file.py:function`; each row "
        "of tasks.data is a task for it. See docs/gateway.md.",
    )
    mcp_servers: dict[Name, McpServerSection] = Field(
        default_factory=dict,
        description="MCP servers by name, whose tools are offered with the environment's own; for example {notes: "
        "{command: [python, notes.py]}, search: {url: 'http://127.0.0.1:8000/mcp'}}. See docs/environments.md.",
    )

    @property
    def answers(self) -> dict[str, str]:
        """The functions that stand for methods of a class, by the method's name."""
        given = {"respond": self.respond, "call_tool": self.call_tool}
        return {name: function for name, function in given.items() if function is not None}

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of all functions that `rows` calls in an episode."""
        return (*self.tools, *self.answers.values())

    @property
    def is_rows(self) -> bool:
        """Whether the environment is `rows`, which has no class: reward functions then decide what a success is."""
        return self.name == "rows"


class TasksSection(TaskData, Section):
    """Rows of a data set as tasks, and the order in which tasks of a pool come."""

    subset: str | None = Field(None, description="Configuration of a Hugging Face data set that has several.")
    revision: str | None = Field(None, description="Commit of a data set on the hub.")
    split: str | None = Field(
        None,
        description="Split to train on; null: train, and all rows of a file that is one split. In a file that holds "
        "several, the field `split` of a row names its split.",
    )
    held_out: str | None = Field(None, description="Split to evaluate on; null: a share of the training split.")
    held_out_share: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.1, description="Approximate share of the rows to hold out; a row's content decides on its side."
    )
    too_long: Literal["refuse", "skip"] = Field(
        "refuse",
        description="What becomes of rows whose first prompt leaves no room for a reply in context.max_tokens: refuse "
        "begins no run, skip leaves them out and names them.",
    )
    shuffle: bool = Field(True, description="Tasks of a pool come in a new order per epoch; false: as rows stand.")

    @model_validator(mode="after")
    def _splits_differ(self) -> Self:
        if self.held_out is not None and self.held_out == (self.split or "train"):
            raise ValueError(
                f"tasks.held_out must be another split than the one that is trained on, got {self.held_out!r} twice. "
                "Leave it out to hold out a share."
            )
        return self


class EnvironmentShare(EnvironmentSection):
    """One of several environments."""

    share: PositiveFloat = Field(description="Its weight: 2, 1 and 1 are a half and two quarters of the episodes.")
    tasks: TasksSection = Field(default_factory=TasksSection, description="Its own tasks, as the section of that name.")


@dataclass(frozen=True)
class EnvironmentPart:
    """One environment of a run, with its tasks."""

    name: str | None
    """None if it is the run's only environment."""
    share: float
    environment: EnvironmentSection
    tasks: TasksSection


def check_environments(config: RunConfig, *checks: Callable[[RunConfig], None]) -> None:
    """Raises ValueError where `environments` contradicts other settings, or where one of the `checks` fails.

    Each check gets the run as it would be with one of its environments alone.
    """
    parts = config.parts
    for section in ("environment", "tasks") if config.environments else ():
        check_default(config, section, when="environments has some, each of which has its own")
    rows = [part.environment.is_rows for part in parts]
    if any(rows) and not all(rows):
        other = parts[rows.index(False)]
        raise ValueError(
            f"environments.{other.name}.name must be rows where that of others is, for the first reward function "
            f"judges all of them, got {other.environment.name}. Write classes for the others, or train two runs."
        )
    for part in parts:
        alone = config.model_copy(update={"environment": part.environment, "tasks": part.tasks, "environments": {}})
        for check in checks:
            try:
                check(alone)
            except ValueError as error:
                raise ValueError(name_environment(part.name, str(error))) from error


def name_environment(name: str | None, problem: str) -> str:
    """Name an environment in an error: with `hard`, `environment.options` becomes `environments.hard.options`."""
    if name is None:
        return problem
    problem = re.sub(r"(?<![.\w])environment\.(?=\w)", f"environments.{name}.", problem)
    return re.sub(r"(?<![.\w])tasks\.(?=\w)", f"environments.{name}.tasks.", problem)
