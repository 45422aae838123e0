"""Which tasks a run trains on, in which order, and which it is judged by."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from agentloop.config.sections.environments import TasksSection
from agentloop.environments.datasets import TaskRows
from agentloop.environments.environment import Task
from agentloop.environments.factory import EnvironmentFactory
from agentloop.errors import UserError

GroupResult = tuple[str, int, float]
"""A group's task by its hash, the attempts of the policy, and the share of them that succeeded."""


class EnvironmentTasks:
    """Training tasks of one environment by index, and held-out tasks, as the seed and a curriculum decide."""

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
        self.rows = rows
        self.name = factory.name if factory.is_one_of_several else None
        """The environment's, where it is one of several."""
        self.order = TaskOrder(pool if rows is None else len(rows.train), seed=seed, section=section or TasksSection())

    def train(self, index: int) -> Task:
        """The `index`-th training task of the run, from 0."""
        return self._task("train", self.order.at(index))

    def held_out(self, count: int) -> list[Task]:
        """The first `count` held-out tasks, or as many as there are; a longer list begins with a shorter one."""
        order = list(range(count if self.rows is None else len(self.rows.held_out)))
        if self.rows is not None:
            random.Random(f"{self._seed}/held-out").shuffle(order)
        return [self._task("held-out", number) for number in order[:count]]

    def record_success(self, done: Sequence[int], groups: Sequence[GroupResult]) -> None:
        """Count the `groups` of a batch whose tasks stood at the indices `done`, a task's groups together and once."""
        if not self.order.adapts:
            return
        counts: dict[str, tuple[int, float]] = {}
        for task, size, rate in groups:
            attempts, successes = counts.get(task, (0, 0.0))
            counts[task] = (attempts + size, successes + size * rate)
        counted: set[int] = set()
        for index in done:
            number, task_hash = self.order.at(index), self._factory.task_hash(self.train(index))
            attempts, successes = (0, 0.0) if number in counted else counts.get(task_hash, (0, 0.0))
            self.order.record_success(index, attempts=attempts, successes=successes)
            counted.add(number)

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

    def record_success(self, done: Sequence[int], groups: Sequence[GroupResult]) -> None:
        for turn, source in enumerate(self._sources):
            own = [index // len(self._sources) for index in done if index % len(self._sources) == turn]
            source.record_success(own, groups)

    def metrics(self) -> dict[str, float]:
        return {
            key if source.name is None else f"{key}/{source.name}": value
            for source in self._sources
            for key, value in source.order.metrics().items()
        }

    def state(self) -> list[dict[str, Any]]:
        """JSON values for `load_state`: each order, and which rows it is of."""
        return [{"rows": source.rows and source.rows.digest, "order": source.order.state()} for source in self._sources]

    def load_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on where `state()` was. Raises UserError for other rows."""
        for source, own, now in zip(self._sources, state, self.state(), strict=True):
            if own["rows"] != now["rows"]:
                raise UserError(
                    "tasks.data must hold the rows that the run began with, got others. Put the file back, or start a "
                    "new run without --resume."
                )
            source.order.load_state(own["order"])


_UNIT = 10**6
"""Weights are whole numbers of this share: their sums are exact, so draws are the same on every machine."""


class TaskOrder:
    """Which task of a pool of `size` stands at each index of the run's line of tasks; index i is task i if unlimited.

    Without a curriculum each epoch of `size` indices gives every task once, in an order of the seed. With
    `learnability` a task that is not under way is drawn with weight max(floor, 4 p (1 - p)), where
    p = (successes + 1) / (attempts + 2) and earlier counts decay whenever it is tried again (Rutherford et al. 2024,
    arXiv 2408.15099; Foster & Foerster 2025, arXiv 2502.12272). An index keeps its task until that is learned from.
    """

    def __init__(self, size: int | Literal["unlimited"], *, seed: int, section: TasksSection) -> None:
        self._size = None if size == "unlimited" else size
        self._seed = seed
        self._section = section
        self._epoch = -1
        self._order: list[int] = []
        self._counts: dict[int, tuple[float, float]] = {}
        """Attempts and successes, decayed, of tasks that were tried."""
        self._weights = np.full(self._size if self._size and self.adapts else 0, _UNIT, np.int64)
        self._given: dict[int, int] = {}
        """Tasks under way by index."""
        self._next = 0
        """The first index that was given no task yet."""

    @property
    def adapts(self) -> bool:
        return self._section.curriculum != "none"

    def at(self, index: int) -> int:
        """The number of the task. With a curriculum, for indices without a recorded success, or new ones in turn."""
        if not self.adapts:
            return self._in_epoch(index)
        while self._next <= index:
            self._given[self._next] = self._drawn()
            self._next += 1
        return self._given[index]

    def record_success(self, index: int, *, attempts: int, successes: float) -> None:
        """The task at `index` is done: of `attempts` of the policy at it (0: none was made), so many succeeded."""
        number = self._given.pop(index)
        if attempts:
            tried, solved = self._counts.get(number, (0.0, 0.0))
            decay = self._section.curriculum_decay
            self._counts[number] = (decay * tried + attempts, decay * solved + successes)
            self._weights[number] = self._weight(number)

    def success(self, number: int) -> float:
        """The estimate p of a task."""
        tried, solved = self._counts.get(number, (0.0, 0.0))
        return (solved + 1.0) / (tried + 2.0)

    def metrics(self) -> dict[str, float]:
        """How much of the pool was never tried, and the success that is expected of the rest."""
        if not self.adapts:
            return {}
        rates = [self.success(number) for number in self._counts]
        expected = {"tasks/expected_success": math.fsum(rates) / len(rates)} if rates else {}
        return {"tasks/untried": float(len(self._weights) - len(rates)), **expected}

    def state(self) -> dict[str, Any]:
        """JSON values that `load_state` goes on from."""
        return {
            "next": self._next,
            "given": sorted(self._given.items()),
            "counts": [[number, *counts] for number, counts in sorted(self._counts.items())],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]
        self._given = dict(state["given"])
        self._counts = {number: (tried, solved) for number, tried, solved in state["counts"]}
        self._weights[:] = _UNIT
        for number in self._counts:
            self._weights[number] = self._weight(number)

    def _in_epoch(self, index: int) -> int:
        """The number at an index of an epoch's order, which is shuffled unless `tasks.shuffle` is false."""
        if self._size is None:
            return index
        epoch, position = divmod(index, self._size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self._size))
            if self._section.shuffle:
                random.Random(f"{self._seed}/epoch/{epoch}").shuffle(self._order)
        return self._order[position]

    def _drawn(self) -> int:
        weights = self._weights.copy()
        under_way = set(self._given.values())
        if len(under_way) < len(weights):
            weights[list(under_way)] = 0
        sums = np.cumsum(weights)
        drawn = random.Random(f"{self._seed}/curriculum/{self._next}").randrange(int(sums[-1]))
        return int(np.searchsorted(sums, drawn, side="right"))

    def _weight(self, number: int) -> int:
        p = self.success(number)
        return max(1, round(_UNIT * max(self._section.curriculum_floor, 4.0 * p * (1.0 - p))))
