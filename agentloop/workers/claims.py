"""The tickets that a worker holds, how many more it may claim, and the tasks that they are of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from agentloop.config import RunConfig
from agentloop.environments import RunEnvironments, Task, TaskSource
from agentloop.errors import UserError
from replay.store import ReplayStore
from replay.ticket_records import EVALUATION, MOST_TRIES, TRAIN, Claim, Place, TicketRecord

_MOST_BATCHES = 8


class HeldClaims:
    """A ticket in its last try is run by itself: should it end this worker, no other one has lost a try by it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Place, Claim] = {}
        self._alone: Place | None = None
        """In its last try."""
        self._makes_room = False
        """A ticket in its last try waits until this worker holds no other."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def all(self) -> list[Claim]:
        return list(self._held.values())

    @property
    def wanted(self) -> int:
        """How many to claim now."""
        if self._makes_room:
            return 0 if self._held else 1
        return 0 if self._alone is not None else self._most - len(self._held)

    def add(self, claims: Sequence[Claim]) -> tuple[list[Claim], list[Claim]]:
        """What is held and run from now on, and what must be given back."""
        last = [claim for claim in claims if claim.tries >= MOST_TRIES]
        others = [claim for claim in claims if claim.tries < MOST_TRIES]
        if last and not others and not self._held:
            others, last = last[:1], last[1:]
            self._alone = others[0].place
        self._makes_room = bool(last)
        self._held.update({claim.place: claim for claim in others})
        return others, last

    def drop(self, places: Iterable[Place]) -> None:
        """They have ended, or are another's."""
        for place in places:
            self._held.pop(place, None)
            if place == self._alone:
                self._alone = None


class IssuedTasks:
    """Tasks of tickets, made from the run's own source: a task follows from the run's seed and its number.

    The number is in the plan of the ticket's batch; the task's hash says that it is the one that was issued.
    """

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
