"""The plan of one iteration's batch, as a run makes it and as a dry run does: the same lines of code. No tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

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
    line: TaskLine,
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
        tasks=[task_hash(index) for index in line.upcoming(mixer.num_tasks)],
    )
    return plan, tuple(line.upcoming(plan.num_tasks))


@dataclass
class TaskLine:
    """Indices of training tasks, in the order they are gone through."""

    next: int = 0
    """The first that has never been in a batch."""
    owed: list[int] = field(default_factory=list)
    """Planned for a batch in which they then had no member: theirs were to be replayed, and could not be drawn."""

    def upcoming(self, count: int) -> list[int]:
        """The next `count`; what is owed comes first."""
        return [*self.owed, *range(self.next, self.next + count)][:count]

    def advance(self, indices: Collection[int], *, without_member: Collection[int] = ()) -> None:
        """`indices`, the upcoming ones, have been in a batch, but for those `without_member`."""
        self.next = max(self.next, 1 + max(indices, default=-1))
        self.owed = [*sorted(without_member), *(index for index in self.owed if index not in indices)]
