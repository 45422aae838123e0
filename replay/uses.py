"""How often each row has been drawn for replay: committed draws, and reservations that have not expired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from replay.change import last_number
from replay.growing import Growing
from replay.index import Column, EligibleIndex
from replay.records import COMMITTED, REPLAY
from replay.reservations import LEASE_DRAWS
from replay.schema import draws, restored_column, runs


@dataclass(frozen=True)
class _Reserved:
    iteration: int
    sequence: int
    trajectory: str


class UseCounts:
    """Follows the draws of all runs. An iteration's draws are read until they are committed, and then never again."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._committed: Counter[str] = Counter()
        self._last_used: dict[str, int] = {}
        self._news: set[str] = set()
        self._reserved: dict[str, list[_Reserved]] = {}
        self._next: dict[str, int] = {}
        self._rollbacks = 0
        self._sequence = 0
        self._layout = -1
        self._uses = Growing(np.zeros(0, np.int64))
        self._newest_use = Growing(np.zeros(0, np.int64))

    def refresh(self, connection: sa.Connection) -> None:
        rollbacks = last_number(connection, "rollbacks")
        if rollbacks != self._rollbacks:
            # A run went back to an earlier iteration: what was counted may never have been.
            self._committed.clear()
            self._last_used.clear()
            self._next.clear()
            self._rollbacks, self._layout = rollbacks, -1
        self._sequence = last_number(connection, "draws")
        self._news.update(row.trajectory for rows in self._reserved.values() for row in rows)
        self._reserved.clear()
        unsettled = [
            (draws.c.run == run) & (draws.c.iteration >= self._next.get(run, 0))
            for run in connection.scalars(sa.select(runs.c.id))
        ]
        columns = [sa.type_coerce(draws.c[name], sa.Text) for name in ("run", "trajectory", "state")]
        query = sa.select(*columns, draws.c.iteration, draws.c.sequence).where(draws.c.stream == REPLAY)
        if unsettled:
            self._add(list(zip(*connection.execute(query.where(sa.or_(*unsettled))).all(), strict=True)))

    def _add(self, found: list[Sequence[Any]]) -> None:
        """Columns: run, trajectory, state, iteration, sequence."""
        if not found:
            return
        names, numbers = map(restored_column, found[:3]), found[3:]
        for run, trajectory, state, iteration, sequence in zip(*names, *numbers, strict=True):
            self._news.add(trajectory)
            if state == COMMITTED:
                self._committed[trajectory] += 1
                self._next[run] = max(self._next.get(run, 0), iteration + 1)
            else:
                self._reserved.setdefault(run, []).append(_Reserved(iteration, sequence, trajectory))
            if run == self.run:
                self._last_used[trajectory] = max(self._last_used.get(trajectory, 0), iteration)

    def columns(self, index: EligibleIndex) -> tuple[Column, Column]:
        """[N] each: draws of every row, and the drawing run's newest iteration that used it; 0 for none."""
        held = Counter[str]()
        for rows in self._reserved.values():
            held.update(row.trajectory for row in rows if row.sequence >= self._sequence - LEASE_DRAWS)
        if self._layout != index.layout:
            self._layout = index.layout
            self._uses, self._newest_use = (Growing(np.zeros(0, np.int64)) for _ in range(2))
            self._news = {*self._committed, *self._last_used, *held}
        for column in (self._uses, self._newest_use):
            column.extend(np.zeros(len(index) - len(column), np.int64))
        for id in self._news:
            position = index.position(id)
            if position is not None:
                self._uses.values[position] = self._committed[id] + held[id]
                self._newest_use.values[position] = self._last_used.get(id, 0)
        self._news.clear()
        return self._uses.values, self._newest_use.values
