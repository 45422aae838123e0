"""Arrays that grow at their end."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Growing:
    """An array with room behind it: adding a few values at a time copies each of them a few times only."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._room = values
        self._size = len(values)

    def __len__(self) -> int:
        return self._size

    @property
    def values(self) -> npt.NDArray[Any]:
        return self._room[: self._size]

    def extend(self, values: npt.NDArray[Any]) -> None:
        end = self._size + len(values)
        if end > len(self._room):
            larger = np.empty(max(end, len(self._room) * 3 // 2), self._room.dtype)
            larger[: self._size] = self.values
            self._room = larger
        self._room[self._size : end] = values
        self._size = end

    def cut(self, size: int) -> None:
        """Forget what comes after the first `size`."""
        self._size = min(self._size, size)
