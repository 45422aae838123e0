"""Rows that rest: by limits on uses and cooldown, or because the run has solved their tasks lately.

Committed draws stand with each row; here are live reservations, and what the run drew lately. A solved task's rows rest
until a newer group shows that the policy has forgotten it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.mixing.request import DrawRequest
from replay.records import ORPHANED, REPLAY
from replay.sampling.index import EligibleIndex
from replay.storage.counters import is_live
from replay.storage.format.column_types import restored_column
from replay.storage.format.rows import chunked
from replay.storage.format.schema import draws, groups, trajectories
from replay.storage.statements import execute

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


def _texts(found: sa.CursorResult[Any]) -> Sequence[str]:
    return restored_column(draws.c.trajectory, found.scalars().all())


class SolvedTasks:
    """Follows the drawing run's newest group of every task that a row may be drawn of, whatever became of its members.

    Groups are read once, and those of its newest iteration again: those of a run that goes on are never undone.
    """

    def __init__(self, run: str) -> None:
        undone = sa.exists().where(trajectories.c.group == groups.c.id, trajectories.c.state == ORPHANED)
        # Of two groups of one iteration the worse one counts: the last to be read.
        self._groups = (
            sa.select(groups.c.task, groups.c.iteration, groups.c.success_rate)
            .where(groups.c.run == run, ~undone)
            .order_by(groups.c.iteration, groups.c.success_rate.desc())
        )
        self._tasks: list[str] | None = None
        self._rates = np.zeros(0)
        self._iteration = -1

    def refresh(self, connection: sa.Connection, index: EligibleIndex) -> bool:
        """Whether anything has changed."""
        tasks, before = index.codes["task"], self._rates
        # What has no rows is not remembered, so that a task that gets some is asked for.
        parts = [] if self._tasks is None else [groups.c.iteration >= self._iteration]
        if self._tasks is not tasks.names:
            self._tasks, self._rates = tasks.names, np.zeros(0)
        new = tasks.names[len(self._rates) :]
        parts += [groups.c.task.in_(chunk) for chunk in chunked(new)]
        self._rates = np.concatenate([self._rates, np.full(len(new), np.nan)])
        for part in parts:
            for task, iteration, rate in connection.execute(self._groups.where(part)):
                self._iteration = max(self._iteration, iteration)
                code = tasks.get(task)
                if code >= 0:
                    self._rates[code] = rate
        return not np.array_equal(before, self._rates, equal_nan=True)

    def solved(self, threshold: float) -> npt.NDArray[np.bool_]:
        """[number of tasks]: whether each is retired, by the index's codes."""
        return self._rates >= threshold
