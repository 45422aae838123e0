"""Loads and checks the environments and tasks of a run; with several environments, each task names its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from agentloop.config import RunConfig
from agentloop.config.sections.environments import name_environment
from agentloop.config.seeds import derive_seed
from agentloop.environments.datasets import load_rows
from agentloop.environments.environment import Task
from agentloop.environments.factory import EnvironmentFactory, load_environment
from agentloop.environments.row_environment import AGENT, agent_function
from agentloop.environments.task_source import EnvironmentTasks, TaskSource
from agentloop.errors import UserError
from agentloop.user_code import is_given, shown_name
from context.messages import canonical_json, content_hash


@dataclass(frozen=True)
class RunEnvironments:
    """The environments of a run by name, and questions that all of them answer together."""

    by_name: Mapping[str, EnvironmentFactory]

    @property
    def all(self) -> tuple[EnvironmentFactory, ...]:
        return tuple(self.by_name.values())

    def factory_for(self, task: Task) -> EnvironmentFactory:
        """Return the factory of the task's environment."""
        return self.all[0] if task.environment is None else self.by_name[task.environment]

    def recorded(self, name: str, version: str) -> EnvironmentFactory | None:
        """Return the environment that made a row; None if the run lacks it, or has another version of it."""
        found = self.by_name.get(name)
        return found if found is not None and found.version == version else None

    @property
    def name(self) -> str:
        return ", ".join(self.by_name)

    @property
    def version(self) -> str:
        return ", ".join(factory.version for factory in self.all)

    @property
    def where(self) -> str:
        named = {name: factory.is_one_of_several for name, factory in self.by_name.items()}
        return ", ".join(f"{name} ({one.where})" if named[name] else one.where for name, one in self.by_name.items())

    @property
    def source(self) -> str:
        if len(self.all) == 1:
            return self.all[0].source
        return content_hash({name: factory.source for name, factory in self.by_name.items()})

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools of all classes and tasks, one of each name."""
        of_tasks = [factory.tools_for(task) for factory in self.all for task in factory.all_examples]
        every = [*(factory.tools for factory in self.all), *of_tasks]
        return tuple({tool["function"]["name"]: tool for tools in every for tool in tools}.values())

    def define(self, *methods: str) -> bool:
        return all(factory.defines(*methods) for factory in self.all)

    def with_version_of(self, source: str) -> Self:
        """Give all environments a new version after a changed source: nobody knows which of them changed."""
        changed = {name: replace(one, version=f"{one.version}+{source[:8]}") for name, one in self.by_name.items()}
        return replace(self, by_name=changed)

    def task_hash(self, task: Task) -> str:
        return self.factory_for(task).task_hash(task)


def open_tasks(
    config: RunConfig, sources: Sequence[str] = (), *, environment_changed: bool = False
) -> tuple[RunEnvironments, TaskSource]:
    """Load and check the environments of a run, and its tasks.

    `sources` are the source digests that the run has had. Raises UserError where today's digest differs from the last
    of them, unless `environment_changed`. If it differs from the first, the version is another.
    """
    rows = {part.name: None if part.tasks.data is None else load_rows(part.tasks) for part in config.parts}
    environments = load_environments(config, {name: found.train[0] for name, found in rows.items() if found})
    if sources and environments.source != sources[-1] and not environment_changed:
        functions = [name for part in config.parts for name in part.environment.functions]
        agents = [part.environment.agent for part in config.parts if part.environment.agent is not None]
        functions += [name for name in map(agent_function, agents) if name is not None]
        functions += [row.function for row in config.reward.functions if agents or config.parts[0].environment.is_rows]
        files = " or ".join(dict.fromkeys(shown_name(n) if is_given(n) else n.rpartition(":")[0] for n in functions))
        raise UserError(
            f"environment must have the source that the run had last, got {files or environments.where} changed since "
            f"(digest {environments.source[:8]} after {sources[-1][:8]}). Put it back, or go on with "
            "--environment-changed (in Python environment_changed=True): rows collected from then on count as another "
            "version of it, and those before keep the rewards that they were given."
        )
    if sources and environments.source != sources[0]:
        environments = environments.with_version_of(environments.source)
    opened = []
    for part, factory in zip(config.parts, environments.all, strict=True):
        seed = derive_seed(config.run.seed, "tasks", *(() if part.name is None else (part.name,)))
        pool, shuffle = part.environment.task_pool, part.tasks.shuffle
        opened.append(EnvironmentTasks(factory, seed=seed, pool=pool, rows=rows[part.name], shuffle=shuffle))
    offering = [_tried_on_rows(factory, tasks) for factory, tasks in zip(environments.all, opened, strict=True)]
    environments = replace(environments, by_name={factory.name: factory for factory in offering})
    return environments, TaskSource(opened, may_differ=environment_changed)


def load_environments(
    config: RunConfig, rows: Mapping[str | None, Mapping[str, Any]], *, options: Mapping[str, Any] | None = None
) -> RunEnvironments:
    """Load each environment and check it with its row; `options` override those of the configuration."""
    by_name = {}
    for part in config.parts:
        section = part.environment
        agent = {} if section.agent is None else {"agent": section.agent}
        try:
            factory = load_environment(
                AGENT if agent else section.name,
                {**section.options, **agent, **(options or {})},
                config.context.registered_authors(),
                row=rows.get(part.name),
                servers=section.mcp_servers,
                tools=section.tools,
                answers=section.answers,
                judges=[judge.function for judge in config.reward.functions] if section.is_rows or agent else [],
            )
        except UserError as error:
            raise UserError(name_environment(part.name, str(error))) from error
        factory = factory if part.name is None else replace(factory, name=part.name, is_one_of_several=True)
        by_name[factory.name] = factory
    return RunEnvironments(by_name)


def _tried_on_rows(factory: EnvironmentFactory, tasks: EnvironmentTasks) -> EnvironmentFactory:
    """Read rows as tasks, and note a task for each set of tools that they offer. Raises UserError for a bad row."""
    offered: dict[str, Task] = {}
    for _, _, task in tasks.read():
        if task.tools is not None:
            offered.setdefault(canonical_json(task.tools), task)
    return replace(factory, further_examples=tuple(offered.values()))
