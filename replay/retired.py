"""Tasks a run has solved lately: their rows rest, until a newer group shows that the policy has forgotten them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.index import EligibleIndex
from replay.records import ORPHANED
from replay.schema import groups, trajectories


class RetiredTasks:
    """Follows the drawing run's newest group of every task, whatever has become of its members since."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._newest: dict[str, tuple[int, float]] = {}

    def refresh(self, connection: sa.Connection) -> None:
        """Groups whose members were all orphaned are of iterations that were undone."""
        kept = sa.exists().where(trajectories.c.group == groups.c.id, trajectories.c.state != ORPHANED)
        query = sa.select(groups.c.task, groups.c.iteration, groups.c.success_rate).where(
            groups.c.run == self.run, kept
        )
        self._newest = {}
        for task, iteration, rate in connection.execute(query):
            found = self._newest.get(task)
            if found is None or iteration > found[0]:
                self._newest[task] = (iteration, rate)
            elif iteration == found[0]:
                self._newest[task] = (iteration, min(rate, found[1]))

    def codes(self, index: EligibleIndex, threshold: float) -> npt.NDArray[np.int64]:
        """Of the retired tasks, as the index numbers them."""
        names = [task for task, (_, rate) in self._newest.items() if rate >= threshold]
        return np.array([index.codes["task"].get(name) for name in names], np.int64)
