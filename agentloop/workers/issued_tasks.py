"""The tasks of tickets: each is made anew from the run's own source, and is the one that was issued by its hash."""

from __future__ import annotations

from collections.abc import Sequence

from agentloop.config import RunConfig
from agentloop.environments import EnvironmentFactory, Task, TaskSource
from agentloop.errors import UserError
from replay.store import ReplayStore
from replay.ticket_records import EVALUATION, TicketRecord

_MOST_BATCHES = 8


class IssuedTasks:
    """A task is a function of the run's seed and its number, which the plan of the ticket's batch holds."""

    def __init__(self, source: TaskSource, factory: EnvironmentFactory, config: RunConfig, store: ReplayStore) -> None:
        self._source = source
        self._factory = factory
        self._held_out_tasks = config.evaluation.tasks
        self._store = store
        self._held_out: dict[str, Task] | None = None
        self._batches: dict[int, dict[str, Task]] = {}

    def plan(self, ticket: TicketRecord) -> Sequence[int]:
        """Numbers of the tasks of the ticket's batch, from the database; empty where they are known already."""
        if ticket.purpose == EVALUATION or ticket.iteration in self._batches:
            return ()
        batch = self._store.tickets.planned_batch(ticket.run, ticket.iteration)
        return () if batch is None else tuple(batch.plan["tasks"])

    def find(self, ticket: TicketRecord, planned: Sequence[int]) -> Task:
        """The task to run, given its `plan`. Raises UserError where this machine makes other tasks than the learner."""
        if ticket.purpose == EVALUATION:
            if self._held_out is None:
                self._held_out = self._by_hash(self._source.held_out(self._held_out_tasks))
            known = self._held_out
        else:
            if ticket.iteration not in self._batches:
                self._batches[ticket.iteration] = self._by_hash([self._source.train(index) for index in planned])
                while len(self._batches) > _MOST_BATCHES:
                    del self._batches[min(self._batches)]
            known = self._batches.get(ticket.iteration, {})
        if ticket.task not in known:
            raise UserError(
                f"tasks of a worker must be the learner's, got none with the hash {ticket.task[:12]} for iteration "
                f"{ticket.iteration}. Use the run's own environment, tasks.data and version of agentloop."
            )
        return known[ticket.task]

    def _by_hash(self, tasks: Sequence[Task]) -> dict[str, Task]:
        return {self._factory.task_hash(task): task for task in tasks}
