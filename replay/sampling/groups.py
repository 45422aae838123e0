"""Groups of which every member is among some rows: arrays over all of them, for there may be many thousands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.intp]


@dataclass(frozen=True)
class WholeGroups:
    """[G] groups, in the order of their first members."""

    rows: Positions
    """[N] members of one group after another, each group's in order."""
    starts: Positions
    """[G]: where in `rows` each group begins."""
    sizes: Positions
    """[G]"""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def first(self) -> Positions:
        """[G]: the first member of each."""
        return self.rows[self.starts]

    def members(self, at: int) -> Positions:
        start = self.starts[at]
        return self.rows[start : start + self.sizes[at]]

    def only(self, kept: npt.NDArray[np.bool_]) -> WholeGroups:
        """[G] bool: those, the rows of the others being left where they are."""
        return WholeGroups(self.rows, self.starts[kept], self.sizes[kept])

    def means(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[G]: of each group's members, where `values` are those of all rows there are."""
        means = np.empty(len(self))
        for size in np.unique(self.sizes).tolist():
            alike = np.flatnonzero(self.sizes == size)
            means[alike] = values[self.rows[self.starts[alike][:, None] + np.arange(size)]].mean(axis=1)
        return means


def whole_groups(positions: Positions, columns: Mapping[str, npt.NDArray[np.int64]]) -> WholeGroups:
    """Those that the rows at `positions`, ascending, make up whole."""
    codes, sizes = columns["group"][positions], columns["group_size"][positions]
    _, first, group, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    complete = counts == sizes[first]
    place = np.empty(len(first), np.intp)
    place[np.argsort(first)] = np.arange(len(first))
    kept = complete[group]
    rows = positions[kept][np.argsort(place[group[kept]], kind="stable")]
    ordered = np.flatnonzero(complete)[np.argsort(first[complete])]
    size = counts[ordered].astype(np.intp)
    return WholeGroups(rows, np.cumsum(size) - size, size)
