"""The environments of a run: most runs have one, and each task of several says which it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentloop.environments.environment import Achieved, Task
from agentloop.environments.factory import EnvironmentFactory
from context.messages import Message, content_hash


@dataclass(frozen=True)
class RunEnvironments:
    """What is asked about a task is asked of the environment that it is of."""

    by_name: Mapping[str, EnvironmentFactory]
    """By the names that their rows have."""

    @classmethod
    def of_one(cls, factory: EnvironmentFactory) -> RunEnvironments:
        """Those of a run that has this one alone."""
        return cls({factory.name: factory})

    @property
    def all(self) -> tuple[EnvironmentFactory, ...]:
        return tuple(self.by_name.values())

    def of(self, task: Task) -> EnvironmentFactory:
        return self.all[0] if task.environment is None else self.by_name[task.environment]

    def recorded(self, name: str, version: str) -> EnvironmentFactory | None:
        """The one that a row is of; None where it is of none, or of another version."""
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
    def tools(self) -> tuple[dict[str, Any], ...]:
        """Of all of them, each name once."""
        return tuple({tool["function"]["name"]: tool for factory in self.all for tool in factory.tools}.values())

    @property
    def can_demonstrate(self) -> bool:
        return all(factory.can_demonstrate for factory in self.all)

    @property
    def rewards_turns(self) -> bool:
        return all(factory.rewards_turns for factory in self.all)

    @property
    def has_achieved(self) -> bool:
        return all(factory.has_achieved for factory in self.all)

    def with_version_of(self, source: str) -> RunEnvironments:
        """All of them as versions of this source: what of it has changed is not known."""
        return replace(self, by_name={name: one.with_version_of(source) for name, one in self.by_name.items()})

    def task_hash(self, task: Task) -> str:
        return self.of(task).task_hash(task)

    def turn_rewards(self, task: Task, messages: Sequence[Message], *, replies: int) -> tuple[float, ...] | None:
        return self.of(task).turn_rewards(task, messages, replies=replies)

    def achieved(self, task: Task, messages: Sequence[Message]) -> list[Achieved]:
        return self.of(task).achieved(task, messages)

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return self.of(task).reward(task, messages)
