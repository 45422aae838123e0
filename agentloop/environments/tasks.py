"""Which tasks a run trains on and which it is judged by."""

from __future__ import annotations

import random
from typing import Literal

from agentloop.environments.base import Task
from agentloop.environments.load import EnvironmentFactory


class TaskSource:
    """Training tasks by index and held-out tasks, a pure function of the seed: the same on every machine.

    Training and held-out tasks come from separate random streams, so held-out tasks are new to the policy
    (up to chance, where an environment has few different tasks).
    """

    def __init__(self, factory: EnvironmentFactory, *, seed: int, pool: int | Literal["unlimited"]) -> None:
        self._factory = factory
        self._seed = seed
        self._pool = pool
        self._epoch = -1
        self._order: list[int] = []

    def train(self, index: int) -> Task:
        """The `index`-th training task of the run, from 0.

        A pool of N is gone through in a new random order per epoch: N indices in a row, from a multiple of N,
        give every task once.
        """
        if self._pool == "unlimited":
            return self._make("train", index)
        epoch, position = divmod(index, self._pool)
        if epoch != self._epoch:
            self._order = list(range(self._pool))
            random.Random(f"{self._seed}/epoch/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._make("train", self._order[position])

    def held_out(self, count: int) -> list[Task]:
        """The first `count` held-out tasks; a longer list begins with a shorter one."""
        return [self._make("held-out", number) for number in range(count)]

    def _make(self, stream: str, number: int) -> Task:
        return self._factory.make_task(random.Random(f"{self._seed}/{stream}/{number}"))
