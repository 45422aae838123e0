"""The tickets that a worker holds, how many more it may claim, and the tasks that they are of."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from agentloop.config import RunConfig
from agentloop.environments import RunEnvironments, Task, TaskSource
from agentloop.errors import UserError
from replay.store import ReplayStore
from replay.ticket_records import EVALUATION, MOST_TRIES, Claim, Place, TicketRecord

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
    """Tasks of tickets, made from the run's own source by their numbers in the batch's plan; their hashes say so."""

    def __init__(
        self, source: TaskSource, environments: RunEnvironments, config: RunConfig, store: ReplayStore
    ) -> None:
        self._source, self._environments, self._store = source, environments, store
        self._held_out_tasks = config.evaluation.tasks
        self._made = lru_cache(_MOST_BATCHES)(self._make)

    def of(self, tickets: Sequence[TicketRecord]) -> list[Task]:
        """The tasks to run, by what was planned. Raises UserError where this machine makes other tasks."""
        found = []
        for ticket in tickets:
            known = self._made(ticket.run, None if ticket.purpose == EVALUATION else ticket.iteration)
            if ticket.task not in known:
                raise UserError(
                    f"tasks of a worker must be the learner's, got none with the hash {ticket.task[:12]} for iteration "
                    f"{ticket.iteration}. Use the run's own environment, tasks.data and version of agentloop."
                )
            found.append(known[ticket.task])
        return found

    def _make(self, run: str, iteration: int | None) -> dict[str, Task]:
        """Tasks by their hashes, of a batch or (None) of the evaluation."""
        if iteration is None:
            tasks = self._source.held_out(self._held_out_tasks)
        else:
            batch = self._store.tickets.planned_batch(run, iteration)
            tasks = [self._source.train(index) for index in batch.plan["tasks"]] if batch else []
        return {self._environments.task_hash(task): task for task in tasks}
