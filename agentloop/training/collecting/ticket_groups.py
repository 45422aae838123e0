"""Groups of episodes become tickets, numbered in the order of their issue."""

from __future__ import annotations

from collections.abc import Sequence

from agentloop.environments import Task
from agentloop.training.components import Components
from replay.records import TaskRecord
from replay.ticket_records import PlannedBatch, Purpose, TicketRecord


def issue_groups(
    components: Components,
    groups: Sequence[tuple[Task, int]],
    iteration: int,
    purpose: Purpose,
    plan: PlannedBatch | None = None,
) -> range:
    """The numbers of (task, size) groups whose episodes workers may run from now on."""
    tickets, run, factory = components.store.tickets, components.run_id, components.actors.factory
    last = tickets.last_number(run)
    numbers = range(0 if last is None else last + 1, len(groups) + (0 if last is None else last + 1))
    tasks, records = {}, []
    for number, (task, size) in zip(numbers, groups, strict=True):
        hash = factory.task_hash(task)
        tasks[hash] = TaskRecord(hash, factory.name, task.payload)
        records += [TicketRecord(run, number, member, hash, iteration, purpose) for member in range(size)]
    tickets.issue(list(tasks.values()), records, plan)
    return numbers
