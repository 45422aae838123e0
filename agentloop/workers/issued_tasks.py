"""The tasks of tickets: each is made anew from the run's own source, and is the one that was issued by its hash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentloop.config import RunConfig
from agentloop.environments import RunEnvironments, Task, TaskSource
from agentloop.errors import UserError
from replay.store import ReplayStore
from replay.ticket_records import EVALUATION, TRAIN, TicketRecord

_MOST_BATCHES = 8


class IssuedTasks:
    """A task is a function of the run's seed and its number, which the plan of the ticket's batch holds."""

    def __init__(
        self, source: TaskSource, environments: RunEnvironments, config: RunConfig, store: ReplayStore
    ) -> None:
        self._source = source
        self._environments = environments
        self._held_out_tasks = config.evaluation.tasks
        self._store = store
        self._held_out: dict[str, Task] | None = None
        self._batches: dict[int, dict[str, Task]] = {}

    def planned(self, tickets: Sequence[TicketRecord]) -> dict[int, Sequence[int]]:
        """Numbers of the tasks of the tickets' batches, from the database, but for those that are known already."""
        wanted = {(ticket.run, ticket.iteration) for ticket in tickets if ticket.purpose == TRAIN}
        for old in sorted(self._batches.keys() - {iteration for _, iteration in wanted})[:-_MOST_BATCHES]:
            del self._batches[old]
        found: dict[int, Sequence[int]] = {}
        for run, iteration in wanted:
            batch = None if iteration in self._batches else self._store.tickets.planned_batch(run, iteration)
            if batch is not None:
                found[iteration] = tuple(batch.plan["tasks"])
        return found

    def find(self, ticket: TicketRecord, planned: Mapping[int, Sequence[int]]) -> Task:
        """The task to run, given what is `planned`. Raises UserError where this machine makes other tasks."""
        if ticket.purpose == EVALUATION:
            if self._held_out is None:
                self._held_out = self._by_hash(self._source.held_out(self._held_out_tasks))
            known = self._held_out
        else:
            if ticket.iteration in planned and ticket.iteration not in self._batches:
                tasks = [self._source.train(index) for index in planned[ticket.iteration]]
                self._batches[ticket.iteration] = self._by_hash(tasks)
            known = self._batches.get(ticket.iteration, {})
        if ticket.task not in known:
            raise UserError(
                f"tasks of a worker must be the learner's, got none with the hash {ticket.task[:12]} for iteration "
                f"{ticket.iteration}. Use the run's own environment, tasks.data and version of agentloop."
            )
        return known[ticket.task]

    def _by_hash(self, tasks: Sequence[Task]) -> dict[str, Task]:
        return {self._environments.task_hash(task): task for task in tasks}
