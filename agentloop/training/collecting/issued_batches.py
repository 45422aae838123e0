"""What workers are to collect becomes tickets: batches are planned once, and found again after a crash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from agentloop.environments import Task
from agentloop.errors import TrainingStopped
from agentloop.training.collecting.collection import task_hash
from agentloop.training.components import Components
from agentloop.training.loop_state import LoopState
from replay.mixing.batch_plan import BatchPlan
from replay.mixing.mixer import ReplayStarved
from replay.mixing.request import Availability
from replay.records import TaskRecord
from replay.ticket_records import TRAIN, PlannedBatch, Purpose, TicketRecord

_PLANS = TypeAdapter(BatchPlan)
_OF_THE_RUN = ("factor", "success_reached")
"""What a mixer learns from iterations; all else of its state follows from its plans."""


@dataclass(frozen=True)
class IssuedBatch:
    """What a batch is made of, decided before any of it is collected."""

    plan: BatchPlan
    tasks: tuple[int, ...]
    """Index of the training task of each slot."""
    version: int
    """The policy's when it was issued: none of its tokens is older."""


class IssuedBatches:
    """The batches from the one whose turn it is, by number."""

    def __init__(self, components: Components, state: LoopState) -> None:
        """Those that were issued before a crash are taken up: their tickets and their rows are there."""
        self._components = components
        self._state = state
        self._batches: dict[int, IssuedBatch] = {}
        for found in components.store.tickets.planned(components.run_id, after=state.batches):
            self._take_up(found)

    def _take_up(self, found: PlannedBatch) -> None:
        values: dict[str, Any] = dict(found.plan)
        tasks = tuple(values["tasks"])
        plan = _PLANS.validate_python(values["plan"])
        self._batches[found.iteration] = IssuedBatch(plan, tasks, values["version"])
        mixer, queue = self._components.mixer, self._state.tasks
        learned = {name: value for name, value in mixer.state().items() if name in _OF_THE_RUN}
        mixer.load_state({**values["mixer"], **learned})
        queue.advance(tasks, collected=lambda turns: turns.planned(tasks, plan.groups))

    def __getitem__(self, number: int) -> IssuedBatch:
        return self._batches[number]

    @property
    def last(self) -> int:
        """The newest of all; what was learned from before counts."""
        return max(self._batches, default=self._state.batches)

    def issue(self, last: int, version: int, available: Availability) -> None:
        """Plan and issue all batches up to `last`, or to the end of the run, that have not been."""
        for number in range(self.last + 1, min(last, self._most()) + 1):
            batch = self._planned(number, version, available)
            self._batches[number] = batch
            self._issue(number, batch)

    def _most(self) -> int:
        """An iteration without fresh rows takes the place of a batch."""
        return self._components.config.run.iterations - (self._state.iteration - self._state.batches)

    def _planned(self, number: int, version: int, available: Availability) -> IssuedBatch:
        mixer, queue = self._components.mixer, self._state.tasks
        upcoming = [task_hash(self._components, index) for index in queue.upcoming(mixer.num_tasks)]
        # What was replayed alone counts: a schedule runs over the iterations of the run, not over its batches.
        iteration = number + self._state.iteration - self._state.batches
        try:
            plan = mixer.plan(iteration=iteration, available=available, tasks=upcoming)
        except ReplayStarved as error:
            raise TrainingStopped(str(error)) from error
        tasks = tuple(queue.upcoming(plan.num_tasks))
        queue.advance(tasks, collected=lambda turns: turns.planned(tasks, plan.groups))
        return IssuedBatch(plan, tasks, version)

    def _issue(self, number: int, batch: IssuedBatch) -> None:
        groups = [(self._components.source.train(batch.tasks[slot]), size) for slot, size in batch.plan.groups]
        values = {
            "plan": _PLANS.dump_python(batch.plan, mode="json"),
            "tasks": list(batch.tasks),
            "version": batch.version,
            "mixer": self._components.mixer.state(),
        }
        plan = PlannedBatch(self._components.run_id, number, values)
        issue_groups(self._components, groups, number, TRAIN, plan)


def issue_groups(
    components: Components,
    groups: Sequence[tuple[Task, int]],
    iteration: int,
    purpose: Purpose,
    plan: PlannedBatch | None = None,
) -> range:
    """The numbers, in the order of issue, of (task, size) groups whose episodes workers may run from now on."""
    tickets, run, environments = components.store.tickets, components.run_id, components.actors.environments
    last = tickets.last_number(run)
    first = 0 if last is None else last + 1
    numbers = range(first, first + len(groups))
    tasks, records = {}, []
    for number, (task, size) in zip(numbers, groups, strict=True):
        hash = environments.task_hash(task)
        tasks[hash] = TaskRecord(hash, environments.of(task).name, task.payload)
        records += [TicketRecord(run, number, member, hash, iteration, purpose) for member in range(size)]
    tickets.issue(list(tasks.values()), records, plan)
    return numbers
