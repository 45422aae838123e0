"""Which tasks a run trains on and which it is judged by."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agentloop.config.sections.dataset import TasksSection
from agentloop.environments.curriculum import TaskOrder
from agentloop.environments.datasets import TaskRows
from agentloop.environments.environment import Task
from agentloop.environments.factory import EnvironmentFactory
from agentloop.errors import UserError

GroupResult = tuple[str, int, float]
"""A group's task by its hash, the attempts of the policy, and the share of them that succeeded."""


class EnvironmentTasks:
    """Training tasks of one environment by index, and held-out tasks.

    Both are a function of the seed, and the same on every machine; a curriculum adds what became of earlier tasks.
    Tasks that the environment makes up come from separate random streams, so held-out ones are new to the policy (up
    to chance, where an environment has few different tasks).
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        *,
        seed: int,
        pool: int | Literal["unlimited"] = "unlimited",
        rows: TaskRows | None = None,
        section: TasksSection | None = None,
    ) -> None:
        """With `rows` their training side is the pool."""
        self._factory = factory
        self._seed = seed
        self._rows = rows
        size = pool if rows is None else len(rows.train)
        self._order = None if size == "unlimited" else TaskOrder(size, seed=seed, section=section or TasksSection())

    @property
    def name(self) -> str | None:
        """The environment's, where it is one of several."""
        return self._factory.name if self._factory.is_one_of_several else None

    @property
    def summary(self) -> str | None:
        """How many rows there are; None where the environment makes its tasks up."""
        return None if self._rows is None else self._rows.summary()

    def train(self, index: int) -> Task:
        """The `index`-th training task of the run, from 0.

        A pool of N is gone through in a new random order per epoch: N indices in a row, from a multiple of N,
        give every task once. A curriculum has rules of its own: see `TaskOrder`.
        """
        number = index if self._order is None else self._order.at(index)
        return self._make("train", number) if self._rows is None else self._read(self._rows.train, number)

    def held_out(self, count: int) -> list[Task]:
        """The first `count` held-out tasks, or as many as there are; a longer list begins with a shorter one."""
        if self._rows is None:
            return [self._make("held-out", number) for number in range(count)]
        order = list(range(len(self._rows.held_out)))
        random.Random(f"{self._seed}/held-out").shuffle(order)
        return [self._read(self._rows.held_out, number) for number in order[:count]]

    def record_success(self, done: Sequence[int], groups: Sequence[GroupResult]) -> None:
        """The tasks at the indices `done` have been in a batch; `groups` are those that the policy tried in it.

        A task's groups are counted together and once, at however many of the indices it stands.
        """
        if self._order is None or not self._order.adapts:
            return
        counts: dict[str, tuple[int, float]] = {}
        for task, size, rate in groups:
            attempts, successes = counts.get(task, (0, 0.0))
            counts[task] = (attempts + size, successes + size * rate)
        counted: set[int] = set()
        for index in done:
            number = self._order.at(index)
            attempts, successes = counts.get(self._factory.task_hash(self.train(index)), (0, 0.0))
            again = number in counted
            self._order.record_success(index, attempts=0 if again else attempts, successes=0.0 if again else successes)
            counted.add(number)

    def metrics(self) -> dict[str, float]:
        return {} if self._order is None else self._order.metrics()

    def state(self) -> dict[str, Any]:
        """JSON values for `load_state`: the order, and which rows it is of."""
        return {
            "rows": None if self._rows is None else self._rows.digest,
            "order": {} if self._order is None else self._order.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state()` was. Raises UserError for other rows."""
        digest = None if self._rows is None else self._rows.digest
        if state["rows"] != digest:
            raise UserError(
                "tasks.data must hold the rows that the run began with, got others. Put the file back, or start a new "
                "run without --resume."
            )
        if self._order is not None:
            self._order.load_state(state["order"])

    def _make(self, stream: str, number: int) -> Task:
        return self._factory.make_task(random.Random(f"{self._seed}/{stream}/{number}"))

    def _read(self, rows: Sequence[Mapping[str, Any]], number: int) -> Task:
        return self._factory.task_from_row(rows[number], f"row {number + 1}")


class TaskSource:
    """The tasks of a run: number i is the (i // n)-th one of the (i % n)-th of its n environments."""

    def __init__(self, sources: Sequence[EnvironmentTasks]) -> None:
        self._sources = sources

    @property
    def summary(self) -> str | None:
        """How many rows there are; None where no environment reads any."""
        found = [(source.name, source.summary) for source in self._sources if source.summary is not None]
        return "; ".join(text if name is None else f"{name}: {text}" for name, text in found) or None

    def train(self, index: int) -> Task:
        number, turn = divmod(index, len(self._sources))
        return self._sources[turn].train(number)

    def held_out(self, count: int) -> list[Task]:
        """One of each in turn; those that have no more are left out."""
        each = [source.held_out(count) for source in self._sources]
        rounds = itertools.chain.from_iterable(itertools.zip_longest(*each))
        return [task for task in rounds if task is not None][:count]

    def record_success(self, done: Sequence[int], groups: Sequence[GroupResult]) -> None:
        for turn, source in enumerate(self._sources):
            own = [index // len(self._sources) for index in done if index % len(self._sources) == turn]
            source.record_success(own, groups)

    def metrics(self) -> dict[str, float]:
        return {
            key if source.name is None else f"{key}/{source.name}": value
            for source in self._sources
            for key, value in source.metrics().items()
        }

    def state(self) -> list[dict[str, Any]]:
        return [source.state() for source in self._sources]

    def load_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on where `state()` was. Raises UserError for other rows."""
        for source, own in zip(self._sources, state, strict=True):
            source.load_state(own)
