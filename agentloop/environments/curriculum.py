"""In which order a pool of tasks is gone through: shuffled, as it stands, or by how often each task succeeds."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from agentloop.config.sections.dataset import TasksSection

_UNIT = 10**6
"""Weights are whole numbers of this share: their sums are exact, so draws are the same on every machine."""


class TaskOrder:
    """Which task of a pool of `size` stands at each index of the run's line of tasks.

    Without a curriculum a pure function of seed and index: each epoch of `size` indices gives every task once.

    `easy_first`: an epoch too gives every task once, those first that succeeded most often when it began.
    `learnability`: an index is drawn with weight max(floor, 4 p (1 - p)), which is greatest where half of the attempts
    succeed and a group teaches most (sampling for learnability: Rutherford et al. 2024, arXiv 2408.15099;
    Foster & Foerster 2025, arXiv 2502.12272). No task comes again while it is under way, and for the floor none is left
    out for good.

    p = (successes + 1) / (attempts + 2), so a task that was never tried has 1/2; its decay is the factor of
    earlier counts each time a task is tried again, for the policy that made them is gone.

    What an index was given is kept until it has been learned from: rates that change in between move nothing.
    """

    def __init__(self, size: int, *, seed: int, section: TasksSection) -> None:
        self.size = size
        self._seed = seed
        self._section = section
        self._epoch = -1
        self._order: list[int] = []
        self._counts: dict[int, tuple[float, float]] = {}
        """Attempts and successes, decayed, of tasks that were tried."""
        self._weights = np.full(size if self.adapts else 0, _UNIT, np.int64)
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
            return self._plain(index)
        while self._next <= index:
            self._given[self._next] = self._easiest() if self._section.curriculum == "easy_first" else self._drawn()
            self._next += 1
        return self._given[index]

    def record_success(self, index: int, *, attempts: int, successes: float) -> None:
        """The task at `index` is done: of `attempts` of the policy at it (0: none was made), so many succeeded."""
        if not self.adapts:
            return
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
        metrics = {"tasks/untried": float(self.size - len(rates))}
        return metrics | ({"tasks/expected_success": math.fsum(rates) / len(rates)} if rates else {})

    def state(self) -> dict[str, Any]:
        """JSON values that `load_state` goes on from; nothing for an order without a curriculum, which has none."""
        if not self.adapts:
            return {}
        return {
            "next": self._next,
            "given": sorted(self._given.items()),
            "counts": [[number, *counts] for number, counts in sorted(self._counts.items())],
            "epoch": self._epoch,
            "order": self._order,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        if not self.adapts:
            return
        self._next = state["next"]
        self._given = dict(state["given"])
        self._counts = {number: (tried, solved) for number, tried, solved in state["counts"]}
        self._epoch, self._order = state["epoch"], list(state["order"])
        self._weights[:] = _UNIT
        for number in self._counts:
            self._weights[number] = self._weight(number)

    def _plain(self, index: int) -> int:
        epoch, position = divmod(index, self.size)
        if not self._section.shuffle:
            return position
        if epoch != self._epoch:
            self._order, self._epoch = self._shuffled(epoch), epoch
        return self._order[position]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self.size))
        random.Random(f"{self._seed}/epoch/{epoch}").shuffle(order)
        return order

    def _easiest(self) -> int:
        epoch, position = divmod(self._next, self.size)
        if epoch != self._epoch:
            # Sorting keeps the shuffled order of equals.
            self._order = sorted(self._shuffled(epoch), key=self.success, reverse=True)
            self._epoch = epoch
        return self._order[position]

    def _drawn(self) -> int:
        weights = self._weights.copy()
        under_way = set(self._given.values())
        if len(under_way) < self.size:
            weights[list(under_way)] = 0
        sums = np.cumsum(weights)
        drawn = random.Random(f"{self._seed}/curriculum/{self._next}").randrange(int(sums[-1]))
        return int(np.searchsorted(sums, drawn, side="right"))

    def _weight(self, number: int) -> int:
        p = self.success(number)
        return max(1, round(_UNIT * max(self._section.curriculum_floor, 4.0 * p * (1.0 - p))))
