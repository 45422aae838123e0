"""Weights that change a few at a time, and positions drawn in proportion to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.intp]
Weights = npt.NDArray[np.float64]

_FIRST_CAPACITY = 64
_FEW = 256
"""Positions for which summing a node twice is quicker than finding out that they share it."""


class SumTree:
    """A binary tree of sums over weights >= 0.

    Every inner node is always exactly its left child plus its right one, so the tree of some weights is the same,
    bit by bit, however it came to hold them. The number of leaves is a power of two and never shrinks; leaves beyond
    the weights are 0 and change neither sums nor draws.
    """

    def __init__(self, weights: Weights | None = None) -> None:
        self._nodes = np.zeros(2 * _FIRST_CAPACITY)
        self._size = 0
        self._journal: list[tuple[Positions, Weights]] | None = None
        if weights is not None:
            self.fill(weights)

    def __len__(self) -> int:
        return self._size

    @property
    def total(self) -> float:
        return float(self._nodes[1])

    @property
    def weights(self) -> Weights:
        """[N], to be read only."""
        return self._nodes[self._leaves : self._leaves + self._size]

    def fill(self, weights: Weights) -> None:
        """All weights anew; linear in their number."""
        leaves = self._leaves
        while leaves < len(weights):
            leaves *= 2
        self._nodes = np.zeros(2 * leaves)
        self._nodes[leaves : leaves + len(weights)] = weights
        self._size = len(weights)
        while leaves > 1:
            below = self._nodes[leaves : 2 * leaves]
            self._nodes[leaves // 2 : leaves] = below[0::2] + below[1::2]
            leaves //= 2

    def extend(self, size: int) -> None:
        """Weights of 0 up to `size` of them."""
        if size > self._leaves:
            self.fill(np.concatenate([self.weights, np.zeros(size - self._size)]))
        self._size = max(self._size, size)

    def put(self, positions: Positions, weights: Weights | float) -> None:
        """Other weights at some positions, each given once: positions x log N."""
        if len(positions) == 0:
            return
        if self._journal is not None:
            self._journal.append((positions, self.weights[positions]))
        nodes = positions + self._leaves
        self._nodes[nodes] = weights
        many = len(nodes) > _FEW
        if many:
            nodes.sort()
        while nodes[0] > 1:
            nodes >>= 1
            if many:
                nodes = nodes[np.concatenate([[True], nodes[1:] != nodes[:-1]])]
            left = 2 * nodes
            self._nodes[nodes] = self._nodes[left] + self._nodes[left + 1]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """What is put meanwhile is taken back at the end."""
        self._journal = []
        try:
            yield
        finally:
            journal, self._journal = self._journal, None
            if journal:
                # What a position weighed before it was first put somewhere.
                positions, first = np.unique(np.concatenate([each for each, _ in journal]), return_index=True)
                self.put(positions, np.concatenate([each for _, each in journal])[first])

    def find(self, shares: npt.NDArray[np.float64]) -> Positions:
        """The position at each share, in [0, 1), of the total: every weight takes a stretch of its own length.

        Never a position of weight 0, whatever the rounding. The total must be positive.
        """
        points = shares * self._nodes[1]
        nodes = np.ones(len(points), np.intp)
        for _ in range(self._leaves.bit_length() - 1):
            nodes *= 2
            left = self._nodes[nodes]
            # A point beyond both children, by rounding, stays in the last one that weighs something.
            right = (points >= left) & (self._nodes[nodes + 1] > 0.0)
            points -= np.where(right, left, 0.0)
            nodes += right
        return nodes - self._leaves

    @property
    def _leaves(self) -> int:
        return len(self._nodes) // 2


def draw_some(tree: SumTree, count: int, random: np.random.Generator) -> tuple[Positions, Weights]:
    """From one to `count` positions, one after another in proportion to the weights that are left, and their weights.

    `count` independent draws, of which each position's first is kept, are just that. What has been drawn weighs 0
    afterwards. The total must be positive.
    """
    found = tree.find(random.random(count))
    drawn = np.array(list(dict.fromkeys(found.tolist())), np.intp)
    weights = tree.weights[drawn]
    tree.put(drawn, 0.0)
    return drawn, weights
