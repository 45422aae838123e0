"""What the loop asks for: a plan, the fresh rows of it, and their slots in the batch."""

from __future__ import annotations

from typing import Protocol

from agentloop.rollouts.evaluation import Evaluation
from agentloop.rollouts.trajectories import Collected
from agentloop.training.components import Components
from agentloop.training.mixed_batch import IterationPlan, MixedBatch
from replay.mixing.request import Availability, DrawRequest
from replay.records import BatchRow
from replay.storage.write import AppendReport


class Collection(Protocol):
    """The fresh stream of a run."""

    def plan(self, iteration: int) -> IterationPlan:
        """What the batch is made of, given what the buffer can give."""
        ...

    def collect(self, planned: IterationPlan) -> Collected:
        """The fresh rows of the plan, in groups, with their advantages."""
        ...

    def append(self, fresh: Collected) -> AppendReport:
        """Remember them: visible whole or not at all."""
        ...

    def reserve(self, request: DrawRequest, fresh: Collected) -> list[BatchRow]:
        """They take the first slots of the iteration's batch."""
        ...

    def end(self, batch: MixedBatch) -> None:
        """The batch is whole: its tasks have had their turn."""
        ...

    def evaluate(self) -> Evaluation:
        """The policy as it is, on held-out tasks."""
        ...

    def end_run(self) -> None:
        """Nothing more is collected."""
        ...


def replay_request(components: Components, iteration: int) -> tuple[DrawRequest, Availability]:
    """What an iteration may ask of the buffer, and what the buffer has for it."""
    version, limits = components.generator.policy_version, components.config.replay.limits
    request = DrawRequest(components.run_id, iteration, version, limits=limits)
    replays = components.mixer.rule.highest_fraction > 0
    return request, components.store.available(request, components.sampler) if replays else Availability()


def task_hash(components: Components, index: int) -> str:
    """Of the training task at an index."""
    return components.actors.environments.task_hash(components.source.train(index))
