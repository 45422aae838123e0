"""The plan of one iteration's batch, as a run makes it and as a dry run does: the same lines of code. No tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentloop.config import RunConfig
from agentloop.config.mixing import limits
from replay.mixing.mixer import BatchPlan, Mixer
from replay.mixing.request import Availability, DrawRequest
from replay.mixing.schedule import progress_at


def draw_request(config: RunConfig, *, run: str, iteration: int, policy_version: int) -> DrawRequest:
    """What `iteration` may draw at all; how much of it is for the plan to say."""
    return DrawRequest(run, iteration, policy_version, limits=limits(config))


def plan_iteration(
    mixer: Mixer,
    config: RunConfig,
    queue: TaskQueue,
    *,
    iteration: int,
    available: Availability,
    task_hash: Callable[[int], str],
) -> tuple[BatchPlan, tuple[int, ...]]:
    """The plan, and the training tasks of its slots. Raises ReplayStarved."""
    plan = mixer.plan(
        iteration=iteration,
        progress=progress_at(iteration, config.run.iterations),
        available=available,
        tasks=[task_hash(index) for index in queue.upcoming(mixer.num_tasks)],
    )
    return plan, tuple(queue.upcoming(plan.num_tasks))


@dataclass
class TaskQueue:
    """Indices of training tasks, in the order they are gone through."""

    next: int = 0
    """The first that has never been in a batch."""
    pending: list[int] = field(default_factory=list)
    """Planned for a batch in which they then had no member: theirs were to be replayed, and could not be drawn."""

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> TaskQueue:
        """Of a checkpoint, also of an earlier version, which called `pending` owed."""
        return cls(values["next"], list(values.get("pending", values.get("owed", ()))))

    def upcoming(self, count: int) -> list[int]:
        """The next `count`; what is pending comes first."""
        return [*self.pending, *range(self.next, self.next + count)][:count]

    def advance(self, indices: Collection[int], *, without_member: Collection[int] = ()) -> None:
        """`indices`, the upcoming ones, have been in a batch, but for those `without_member`."""
        self.next = max(self.next, 1 + max(indices, default=-1))
        self.pending = [*sorted(without_member), *(index for index in self.pending if index not in indices)]
