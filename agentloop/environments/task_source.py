"""Decides which tasks a run trains on, in which order, and which tasks it is evaluated on."""

import copy
import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, Self

from agentloop.environments.datasets import MOST_READ, SIDES, Side, TaskRows
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
        self._kept = {} if rows is None else {side: list(range(len(rows.of(side)))) for side in SIDES}
        """Positions of the rows that can be tasks."""
        self._size = (None if pool == "unlimited" else pool) if rows is None else len(rows.train)
        self._shuffle = shuffle
        self._epoch = -1
        self._order: list[int] = []

    def train(self, index: int) -> Task:
        """Return the `index`-th training task of the run, from 0."""
        number = self._number(index)
        return self._task("train", number if self.rows is None else self._kept["train"][number])

    def held_out(self, count: int) -> list[Task]:
        """Return the first `count` held-out tasks, or all if there are fewer; longer lists begin with shorter ones."""
        order = list(range(count)) if self.rows is None else list(self._kept["held-out"])
        if self.rows is not None:
            random.Random(f"{self._seed}/held-out").shuffle(order)
        return [self._task("held-out", number) for number in order[:count]]

    def read(self, *, sides: Sequence[Side] = SIDES, most: int = MOST_READ) -> Iterator[tuple[Side, int, Task]]:
        """Make tasks of the rows, with side and position; of more than `most` on a side, some at equal distances."""
        for side in sides:
            count = 0 if self.rows is None else len(self.rows.of(side))
            for position in range(0, count, max(-(-count // most), 1)):
                yield side, position, self._task(side, position)

    def without(self, left_out: Mapping[Side, Collection[int]]) -> Self:
        """Leave out rows by their positions on a side."""
        fewer = copy.copy(self)
        gone = {side: frozenset(positions) for side, positions in left_out.items()}
        fewer._kept = {side: [at for at in kept if at not in gone.get(side, ())] for side, kept in self._kept.items()}
        fewer._size, fewer._epoch = len(fewer._kept["train"]), -1
        return fewer

    def _number(self, index: int) -> int:
        if self._size is None:
            return index
        epoch, position = divmod(index, self._size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self._size))
            if self._shuffle:
                random.Random(f"{self._seed}/epoch/{epoch}").shuffle(self._order)
        return self._order[position]

    def _task(self, stream: Side, number: int) -> Task:
        if self.rows is None:
            return self._factory.make_task(random.Random(f"{self._seed}/{stream}/{number}"))
        return self._factory.task_from_row(self.rows.of(stream)[number], self.rows.place(stream, number))


class TaskSource:
    """The tasks of a run: task i is the (i // n)-th task of the (i % n)-th of its n environments."""

    def __init__(self, sources: Sequence[EnvironmentTasks], *, may_differ: bool = False) -> None:
        """`may_differ`: a resumed run goes on with rows that it did not begin with."""
        self.sources = sources
        self.may_differ = may_differ

    @property
    def summary(self) -> str | None:
        """Say how many rows there are; None where no environment reads rows."""
        found = [(source.name, source.rows.summary()) for source in self.sources if source.rows is not None]
        return "; ".join(text if name is None else f"{name}: {text}" for name, text in found) or None

    def train(self, index: int) -> Task:
        number, turn = divmod(index, len(self.sources))
        return self.sources[turn].train(number)

    def held_out(self, count: int) -> list[Task]:
        """Take one held-out task of each environment in turn; an environment that has no more is passed over."""
        each = [source.held_out(count) for source in self.sources]
        rounds = itertools.chain.from_iterable(itertools.zip_longest(*each))
        return [task for task in rounds if task is not None][:count]

    def state(self) -> list[str | None]:
        """Return the digest of each environment's rows, for `check_state`; None where it reads no rows."""
        return [None if source.rows is None else source.rows.digest for source in self.sources]

    def check_state(self, state: Sequence[str | None]) -> None:
        """Raise UserError if the rows are not those that `state()` described."""
        if state != self.state() and not self.may_differ:
            raise UserError(
                "tasks.data must hold the rows that the run had last, got others. Put the file back, or go on with "
                "--environment-changed: each row decides by its content alone whether it is held out."
            )
