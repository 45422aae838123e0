"""Batches that are issued to workers as tickets. Each is planned once, and found again after a crash."""

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from agentloop.environments import Task
from agentloop.rollouts.trajectories import task_record
from agentloop.training.collecting.collection import plan_batch
from agentloop.training.components import Components
from agentloop.training.loop_state import LoopState
from replay.mixing.batch_plan import BatchPlan
from replay.mixing.request import Availability
from replay.storage.collecting.ticket_records import TRAIN, PlannedBatch, Purpose, TicketRecord

_PLANS = TypeAdapter(BatchPlan)


IssuedBatch = tuple[BatchPlan, tuple[int, ...]]
"""The plan of a batch, made before any of its episodes are collected, and the index of the task of each slot."""


class IssuedBatches:
    """The issued batches that are not learned from yet, by number."""

    def __init__(self, components: Components, state: LoopState) -> None:
        """Load the batches that were issued before a crash; their tickets and rows are stored."""
        self._components = components
        self._state = state
        self._batches: dict[int, IssuedBatch] = {}
        mixer = components.mixer
        for found in components.store.tickets.planned(components.run_id, after=state.batches):
            values: dict[str, Any] = dict(found.plan)
            plan = _PLANS.validate_python(values["plan"])
            self._add(found.iteration, plan, tuple(values["tasks"]))
            # This a mixer learns from iterations. The other parts of its state follow from its plans.
            learned = {"success_reached": mixer.success_reached}
            mixer.load_state({**values["mixer"], **learned})

    def _add(self, number: int, plan: BatchPlan, tasks: tuple[int, ...]) -> None:
        self._batches[number] = (plan, tasks)
        self._state.tasks.advance(tasks, collected=lambda turns: turns.planned(tasks, plan.groups))

    def __getitem__(self, number: int) -> IssuedBatch:
        return self._batches[number]

    def issue(self, last: int, version: int, available: Availability) -> None:
        """Plan and issue the missing batches up to `last`, or to the end of the run."""
        # A batch that failed or was forgotten made no iteration.
        parts, lost = self._components, self._state.batches - self._state.iteration
        newest = max(self._batches, default=self._state.batches)  # it may be learned from already
        for number in range(newest + 1, min(last, parts.config.run.iterations + lost) + 1):
            plan, tasks = plan_batch(parts, self._state, number - lost, available)
            self._add(number, plan, tasks)
            values = {"tasks": list(tasks), "version": version, "mixer": parts.mixer.state()}
            values["plan"] = _PLANS.dump_python(plan, mode="json")
            groups = [(parts.source.train(tasks[slot]), size) for slot, size in plan.groups]
            issue_groups(parts, groups, number, TRAIN, PlannedBatch(parts.run_id, number, values))


def issue_groups(
    components: Components,
    groups: Sequence[tuple[Task, int]],
    iteration: int,
    purpose: Purpose,
    plan: PlannedBatch | None = None,
) -> range:
    """Issue (task, size) groups, whose episodes workers may then run. Returns the groups' numbers, in order."""
    tickets, run, environments = components.store.tickets, components.run_id, components.actors.environments
    last = tickets.last_number(run)
    first = 0 if last is None else last + 1
    numbers = range(first, first + len(groups))
    tasks, records = {}, []
    for number, (task, size) in zip(numbers, groups, strict=True):
        hash = environments.task_hash(task)
        tasks[hash] = task_record(environments.factory_for(task), task)
        records += [TicketRecord(run, number, member, hash, iteration, purpose) for member in range(size)]
    tickets.issue(list(tasks.values()), records, plan)
    return numbers
