"""Several environments in one run, each with its share of the episodes that are collected."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from agentloop.config.model_defaults import check_unused
from agentloop.config.sections.dataset import TasksSection
from agentloop.config.sections.environments.environment_section import EnvironmentSection
from agentloop.config.sections.environments.named_sections import read_sections
from replay.setting_types import PositiveFloat

if TYPE_CHECKING:
    from agentloop.config.run_config import RunConfig


class EnvironmentShare(EnvironmentSection):
    """One of several environments."""

    share: PositiveFloat = Field(description="Its weight: 2, 1 and 1 are a half and two quarters of the episodes.")
    tasks: TasksSection = Field(default_factory=TasksSection, description="Its own tasks, as the section of that name.")


def _read_environments(values: Any) -> Any:
    return read_sections(values, "environments", EnvironmentShare)


EnvironmentShares = Annotated[dict[str, EnvironmentShare], BeforeValidator(_read_environments)]


@dataclass(frozen=True)
class EnvironmentPart:
    """One environment of a run, with its tasks."""

    name: str | None
    """None: the run has this one alone."""
    share: float
    environment: EnvironmentSection
    tasks: TasksSection


def environment_parts(config: RunConfig) -> tuple[EnvironmentPart, ...]:
    """The environments of a run, in the order of the configuration."""
    if not config.environments:
        return (EnvironmentPart(None, 1.0, config.environment, config.tasks),)
    return tuple(EnvironmentPart(name, part.share, part, part.tasks) for name, part in config.environments.items())


def check_environments(config: RunConfig, *checks: Callable[[RunConfig], None]) -> None:
    """Raises ValueError where a run would have two answers to which environments it has, or where one of the `checks`
    does, each of which is made of the run as it would be with one of its environments alone."""
    if not config.environments:
        for check in checks:
            check(config)
        return
    for name, section in (("environment", config.environment), ("tasks", config.tasks)):
        keys = type(section).model_fields
        check_unused(section, keys, where=name, when="environments has some, each of which has its own")
    parts = environment_parts(config)
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
                raise ValueError(said_of(part.name, str(error))) from error


def said_of(name: str | None, problem: str) -> str:
    """A problem of the sections `environment` and `tasks`; with a name, about those of one of several environments."""
    if name is None:
        return problem
    problem = re.sub(r"(?<![.\w])environment\.(?=\w)", f"environments.{name}.", problem)
    return re.sub(r"(?<![.\w])tasks\.(?=\w)", f"environments.{name}.tasks.", problem)
