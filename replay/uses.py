"""What limits on uses ask besides a row's committed draws: live reservations, and what the run drew lately."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.column_types import restored_column
from replay.index import EligibleIndex
from replay.prepared import execute
from replay.records import REPLAY
from replay.request import DrawRequest
from replay.reservations import is_live
from replay.schema import draws

_TRAJECTORY = sa.type_coerce(draws.c.trajectory, sa.Text)
_RESERVED = sa.select(_TRAJECTORY).where(is_live(), draws.c.stream == REPLAY)
_LATEST = sa.select(_TRAJECTORY).where(
    draws.c.run == sa.bindparam("run"), draws.c.iteration >= sa.bindparam("since"), draws.c.stream == REPLAY
)


class Uses:
    """The draws of this moment: those of updates that are still to come, of all runs, and the run's own latest ones."""

    def __init__(self) -> None:
        self._reserved = Counter[str]()
        self._resting = frozenset[str]()

    def refresh(self, connection: sa.Connection, request: DrawRequest) -> bool:
        """Whether anything has changed."""
        before, limits = (self._reserved, self._resting), request.limits
        if limits.max_uses is not None:
            self._reserved = Counter(_texts(execute(connection, _RESERVED)))
        if limits.cooldown > 0:
            since = request.iteration - limits.cooldown
            self._resting = frozenset(_texts(execute(connection, _LATEST, run=request.run, since=since)))
        return before != (self._reserved, self._resting)

    def reserved(self, index: EligibleIndex) -> npt.NDArray[np.int64]:
        """[N]: reservations of each row that may still be committed."""
        counts = np.zeros(len(index), np.int64)
        for id, count in self._reserved.items():
            position = index.position(id)
            if position is not None:
                counts[position] = count
        return counts

    def resting(self, index: EligibleIndex) -> npt.NDArray[np.bool_]:
        """[N]: rows that the run has drawn in the iterations of its cooldown."""
        found = np.zeros(len(index), np.bool_)
        found[[position for position in map(index.position, self._resting) if position is not None]] = True
        return found


def _texts(found: sa.CursorResult[Any]) -> list[str]:
    return restored_column(found.scalars().all())
