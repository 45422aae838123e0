"""Short chains before long ones: what an on-policy run can do with knowledge of what makes a task easy."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentloop.config import RunConfig
from agentloop.config.seeds import derive_seed
from agentloop.environments import load_environment
from agentloop.environments.environment import Task
from agentloop.environments.factory import EnvironmentFactory
from agentloop.environments.task_source import EnvironmentTasks, TaskSource
from agentloop.training.components import Components

EPISODES = 256
"""Of each stage."""
STAGES: Mapping[str, Sequence[tuple[int, int]]] = {
    "dense": ((1, 2), (1, 3), (2, 4)),
    "sparse": ((1, 3), (2, 4), (3, 5)),
    "very_sparse": ((1, 3), (2, 4), (4, 6), (5, 7)),
}
"""Fewest and most hops before the task's own, by task."""


class ShortFirst(EnvironmentTasks):
    """Of each stage the tasks of EPISODES episodes, then the run's own. Held-out tasks are the run's own."""

    def __init__(self, config: RunConfig, factory: EnvironmentFactory, stages: Sequence[tuple[int, int]]) -> None:
        self.seed = derive_seed(config.run.seed, "tasks")
        super().__init__(factory, seed=self.seed)
        self.groups = EPISODES // config.batch.group_size
        section = config.environment
        self.stages = [
            load_environment(section.name, {**section.options, "hops": list(hops)}, factory.registered)
            for hops in stages
        ]

    def train(self, index: int) -> Task:
        stage = index // self.groups
        if stage >= len(self.stages):
            return super().train(index)
        return self.stages[stage].make_task(random.Random(f"{self.seed}/stage/{index}"))


def short_first(parts: Components, task: str) -> Components:
    (factory,) = parts.actors.environments.all
    return replace(parts, source=TaskSource([ShortFirst(parts.config, factory, STAGES[task])]))
