"""Decides which tasks a run trains on, in which order, and which tasks it is evaluated on."""

import itertools
import random
from collections.abc import Sequence
from typing import Literal

from agentloop.environments.datasets import TaskRows
from agentloop.environments.environment import Task
from agentloop.environments.factory import EnvironmentFactory
from agentloop.errors import UserError


class EnvironmentTasks:
    """The training tasks of one environment by index, and its held-out tasks; the seed decides both."""

    def __init__(
        self,
        factory: EnvironmentFactory,
        *,
        seed: int,
        pool: int | Literal["unlimited"] = "unlimited",
        rows: TaskRows | None = None,
        shuffle: bool = True,
    ) -> None:
        """The training rows of `rows`, if given, are the pool; `shuffle` gives the pool a new order in each epoch."""
        self._factory = factory
        self._seed = seed
        self.rows = rows
        self.name = factory.name if factory.is_one_of_several else None
        self._size = (None if pool == "unlimited" else pool) if rows is None else len(rows.train)
        self._shuffle = shuffle
        self._epoch = -1
        self._order: list[int] = []

    def train(self, index: int) -> Task:
        """Return the `index`-th training task of the run, from 0."""
        return self._task("train", self._number(index))

    def held_out(self, count: int) -> list[Task]:
        """Return the first `count` held-out tasks, or all if there are fewer; longer lists begin with shorter ones."""
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
    """The tasks of a run: task i is the (i // n)-th task of the (i % n)-th of its n environments."""

    def __init__(self, sources: Sequence[EnvironmentTasks]) -> None:
        self._sources = sources

    @property
    def summary(self) -> str | None:
        """Say how many rows there are; None where no environment reads rows."""
        found = [(source.name, source.rows.summary()) for source in self._sources if source.rows is not None]
        return "; ".join(text if name is None else f"{name}: {text}" for name, text in found) or None

    def train(self, index: int) -> Task:
        number, turn = divmod(index, len(self._sources))
        return self._sources[turn].train(number)

    def held_out(self, count: int) -> list[Task]:
        """Take one held-out task of each environment in turn; an environment that has no more is passed over."""
        each = [source.held_out(count) for source in self._sources]
        rounds = itertools.chain.from_iterable(itertools.zip_longest(*each))
        return [task for task in rounds if task is not None][:count]

    def state(self) -> list[str | None]:
        """Return the digest of each environment's rows, for `check_state`; None where it reads no rows."""
        return [None if source.rows is None else source.rows.digest for source in self._sources]

    def check_state(self, state: Sequence[str | None]) -> None:
        """Raise UserError if the rows are not those that `state()` described."""
        if state != self.state():
            raise UserError(
                "tasks.data must hold the rows that the run began with, got others. Put the file back, or start a new "
                "run without --resume."
            )
