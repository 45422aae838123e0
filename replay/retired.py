"""Tasks a run has solved lately: their rows rest, until a newer group shows that the policy has forgotten them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.index import EligibleIndex
from replay.records import ORPHANED
from replay.rows import chunked
from replay.schema import groups, trajectories


class RetiredTasks:
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
