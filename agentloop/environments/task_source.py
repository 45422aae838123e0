"""Which tasks a run trains on, in which order, and which it is judged by."""

import itertools
import random
from collections.abc import Sequence
from typing import Literal

from agentloop.environments.datasets import TaskRows
from agentloop.environments.environment import Task
from agentloop.environments.factory import EnvironmentFactory
from agentloop.errors import UserError


class EnvironmentTasks:
    """Training tasks of one environment by index, and held-out tasks, as the seed decides."""

    def __init__(
        self,
        factory: EnvironmentFactory,
        *,
        seed: int,
        pool: int | Literal["unlimited"] = "unlimited",
        rows: TaskRows | None = None,
        shuffle: bool = True,
    ) -> None:
        """With `rows` their training side is the pool; `shuffle` gives it a new order in each epoch."""
        self._factory = factory
        self._seed = seed
        self.rows = rows
        self.name = factory.name if factory.is_one_of_several else None
        self._size = (None if pool == "unlimited" else pool) if rows is None else len(rows.train)
        self._shuffle = shuffle
        self._epoch = -1
        self._order: list[int] = []

    def train(self, index: int) -> Task:
        """The `index`-th training task of the run, from 0."""
        return self._task("train", self._number(index))

    def held_out(self, count: int) -> list[Task]:
        """The first `count` held-out tasks, or as many as there are; a longer list begins with a shorter one."""
        order = list(range(count if self.rows is None else len(self.rows.held_out)))
        if self.rows is not None:
            random.Random(f"{self._seed}/held-out").shuffle(order)
        return [self._task("held-out", number) for number in order[:count]]

    def _number(self, index: int) -> int:
        if self._size is None:
            return index
        epoch, position = divmod(index, self._size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self._size))
            if self._shuffle:
                random.Random(f"{self._seed}/epoch/{epoch}").shuffle(self._order)
        return self._order[position]

    def _task(self, stream: Literal["train", "held-out"], number: int) -> Task:
        if self.rows is None:
            return self._factory.make_task(random.Random(f"{self._seed}/{stream}/{number}"))
        rows = self.rows.train if stream == "train" else self.rows.held_out
        return self._factory.task_from_row(rows[number], f"row {number + 1}")


class TaskSource:
    """The tasks of a run: number i is the (i // n)-th one of the (i % n)-th of its n environments."""

    def __init__(self, sources: Sequence[EnvironmentTasks]) -> None:
        self._sources = sources

    @property
    def summary(self) -> str | None:
        """How many rows there are; None where no environment reads any."""
        found = [(source.name, source.rows.summary()) for source in self._sources if source.rows is not None]
        return "; ".join(text if name is None else f"{name}: {text}" for name, text in found) or None

    def train(self, index: int) -> Task:
        number, turn = divmod(index, len(self._sources))
        return self._sources[turn].train(number)

    def held_out(self, count: int) -> list[Task]:
        """One of each in turn; those that have no more are left out."""
        each = [source.held_out(count) for source in self._sources]
        rounds = itertools.chain.from_iterable(itertools.zip_longest(*each))
        return [task for task in rounds if task is not None][:count]

    def state(self) -> list[str | None]:
        """Which rows each environment reads, by their digests, for `check_state`."""
        return [None if source.rows is None else source.rows.digest for source in self._sources]

    def check_state(self, state: Sequence[str | None]) -> None:
        """Raises UserError for other rows than those that `state()` told of."""
        if state != self.state():
            raise UserError(
                "tasks.data must hold the rows that the run began with, got others. Put the file back, or start a new "
                "run without --resume."
            )
