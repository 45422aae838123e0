"""What an environment is like before a run begins: what the policy is shown, and what may be missing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agentloop.config import RunConfig
from agentloop.environments import Environment, EnvironmentFactory, Task, TaskSource, open_tasks
from agentloop.environments.check import reward_now
from agentloop.environments.tools.worker_threads import close_now
from agentloop.errors import UserError
from agentloop.rollouts.demonstrated import demonstrate
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.rewards import RewardScorer, open_scorer
from context.authors import LLM
from context.messages import Message

_DRAWN, _DEMONSTRATED = 100, 20
"""Tasks that are compared with each other; demonstrations that are judged."""
_METHODS = ("make_task", "task_from_row", "start", "close", "turn_rewards", "achieved", "demonstrate")


@dataclass(frozen=True)
class EnvironmentCheck:
    """What was found. What would stop a run is an error instead."""

    environment: str
    version: str
    tools: tuple[Mapping[str, Any], ...]
    """As the chat template is given them."""
    methods: tuple[str, ...]
    """What the class defines besides `reward` and tools."""
    example: Task
    rows: str | None
    """How many rows there are; None where tasks are made up."""
    different: int
    """Tasks among the first 100 to train on that differ from each other."""
    shared: int
    """Held-out tasks of an evaluation that are among those."""
    empty_rewards: tuple[float, float]
    """Of an empty reply, asked twice; reward functions have been tried on it, too."""
    demonstrated: float | None
    """Share of demonstrations that are a success; None: there are none."""

    def to_json(self) -> dict[str, Any]:
        messages = [asdict(message) for message in self.example.messages()]
        example = {"messages": messages, "payload": dict(self.example.payload)}
        return {**asdict(self), "example": example, "remarks": list(self.remarks())}

    def remarks(self) -> Iterator[str]:
        """What may be missing or wrong."""
        if not self.tools:
            yield "there is no tool: the policy can only answer"
        for function in (tool["function"] for tool in self.tools):
            properties = function["parameters"].get("properties", {})
            silent = ", ".join(name for name, schema in properties.items() if "description" not in schema)
            if silent:
                yield f"tool {function['name']} does not say what {silent} means: write Args: in its docstring"
        if self.rows is None and self.different < _DRAWN:
            yield f"of {_DRAWN} tasks {self.different} are different, and {self.shared} held-out ones are among them"
        if self.empty_rewards[0] != self.empty_rewards[1]:
            first, second = self.empty_rewards
            yield f"reward is not the same for the same conversation: {first:g}, then {second:g}"
        if self.demonstrated is None:
            yield "there is no demonstrate: the built-in model can't be warmed up for it, so set model.path"
        elif self.demonstrated == 0:
            yield f"none of {_DEMONSTRATED} demonstrations is a success"


def check_environment(config: RunConfig) -> EnvironmentCheck:
    """Raises UserError for whatever would stop a run."""
    factory, source, scorer = opened(config)
    example, environment = source.train(0), factory.environment
    tasks = {factory.task_hash(source.train(index)) for index in range(_DRAWN)}
    held_out = [factory.task_hash(task) for task in source.held_out(config.evaluation.tasks)]
    return EnvironmentCheck(
        environment=factory.where,
        version=factory.version,
        tools=factory.tools,
        methods=tuple(name for name in _METHODS if getattr(environment, name) is not getattr(Environment, name)),
        example=example,
        rows=source.summary,
        different=len(tasks),
        shared=sum(task in tasks for task in held_out),
        empty_rewards=(_of_nothing(factory, scorer, example), _of_nothing(factory, scorer, example)),
        demonstrated=_demonstrated(factory, config.rollout.success_reward) if factory.can_demonstrate else None,
    )


def opened(config: RunConfig) -> tuple[EnvironmentFactory, TaskSource, RewardScorer]:
    """Raises UserError where a configuration has several environments."""
    environments, source = open_tasks(config)
    if len(environments.all) > 1:
        raise UserError(f"CONFIG must have one environment, got {len(environments.all)}. Name one of them.")
    return environments.all[0], source, open_scorer(config, environments)


def _of_nothing(factory: EnvironmentFactory, scorer: RewardScorer, task: Task) -> float:
    """The reward of an empty reply."""
    messages = (*task.messages(), Message("assistant", "", author=LLM))
    with factory.started(task) as environment:
        reward = reward_now(environment, task, messages, factory.where)
    (episode,) = scorer.score([Episode.answered(task, messages, reward)]).episodes
    return episode.environment_reward


def _demonstrated(factory: EnvironmentFactory, success: float) -> float:
    rng, successes = random.Random(0), 0
    for _ in range(_DEMONSTRATED):
        environment, task = factory.create(), factory.make_task(rng)
        try:
            with factory.connected_now(environment):
                messages = demonstrate(environment, task, rng, where=factory.where)
                successes += reward_now(environment, task, messages, factory.where) >= success
        finally:
            close_now(environment, factory.where)
    return successes / _DEMONSTRATED
