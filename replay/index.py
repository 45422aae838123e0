"""The rows a run may draw, in memory: columns that follow the database a change at a time."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.change import last_number
from replay.comparable import run_mismatches, sampling_mismatch
from replay.errors import DamagedCell
from replay.growing import Growing
from replay.records import ELIGIBLE
from replay.rows import named
from replay.schema import Checked, ExactText, Real, Share, Size, Truth, Whole, groups, restored_column, trajectories

Column = npt.NDArray[Any]

_BATCH = 5_000
_rows = trajectories.c

# Texts as the database has them: a row at a time, ExactText takes longer than the query.
_TEXTS = (_rows.id, _rows.run, _rows.source, _rows.task, _rows.group)
_NUMBERS: dict[str, tuple[sa.ColumnElement[Any], type]] = {
    "iteration": (_rows.iteration, np.int64),
    "slot": (_rows.slot, np.int64),
    "success": (_rows.success, np.bool_),
    "reward": (_rows.reward, np.float64),
    "advantage": (_rows.advantage, np.float64),
    "policy_version": (_rows.policy_version_min, np.int64),
    "num_action_tokens": (_rows.num_action_tokens, np.int64),
    "mean_entropy": (_rows.mean_entropy, np.float64),
    "group_size": (groups.c.size, np.int64),
    "group_success_rate": (groups.c.success_rate, np.float64),
    "group_reward_std": (groups.c.reward_std, np.float64),
    "mismatch": (sampling_mismatch(_rows), np.int64),
}
_CODES = ("run", "source", "task", "group")


class Codes:
    """Small numbers in place of texts, in the order they came."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._codes: dict[str, int] = {}

    def of(self, names: Iterable[str]) -> list[int]:
        codes = self._codes
        found = []
        for name in names:
            code = codes.get(name)
            if code is None:
                code = codes[name] = len(codes)
                self.names.append(name)
            found.append(code)
        return found

    def get(self, name: str) -> int:
        """-1 for a name that no row has."""
        return self._codes.get(name, -1)


class EligibleIndex:
    """Every eligible row of the database, as the run that draws sees it.

    Rows stand in an order that depends on their content alone: those of other runs first, by run; within a run by
    iteration, slot and id. So what the drawing run collects is added at the end, and row order, clocks and the
    history of refreshes leave no trace in a draw.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.ids: list[str] = []
        self.layout = 0
        """Grows when rows have moved, or facts about them have changed; rows added at the end change nothing."""
        self.codes = {name: Codes() for name in _CODES}
        self._columns = {name: Growing(np.empty(0, kind)) for name, (_, kind) in _NUMBERS.items()}
        self._columns |= {name: Growing(np.empty(0, np.int64)) for name in _CODES}
        self._columns["own"] = Growing(np.empty(0, np.bool_))
        self._last: int | None = None
        self.damaged: dict[str, str] = {}
        """Reasons by id of rows left out because of what stands in them; whoever may write quarantines them."""
        self._run_mismatch: dict[str, int] = {}
        self._of_run = np.zeros(0, np.int64)
        self._positions: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_filled(self) -> bool:
        """Whether it was refreshed before: the first time takes all rows."""
        return self._last is not None

    @property
    def columns(self) -> Mapping[str, Column]:
        """By name, [N] each; to be read only."""
        return {name: column.values for name, column in self._columns.items()}

    def position(self, id: str) -> int | None:
        """None: no eligible row has the id."""
        if self._positions is None:
            self._positions = {name: position for position, name in enumerate(self.ids)}
        return self._positions.get(id)

    def refresh(self, connection: sa.Connection) -> bool:
        """Everything that has changed since the last time; whether anything had."""
        first = self._last is None
        # Numbers handed out in order, under a lock: one that is seen has no smaller one still to come. That of a row
        # is not asked: a damaged one would hide all that come later.
        newest = last_number(connection, "changed")
        if self._last is not None and newest < self._last:
            raise DamagedCell("buffer_state.value of 'changed'", f"not fall below {self._last}", str(newest))
        come, gone = _Batch(self.codes), []
        for rows in _changed(connection, since=self._last):
            gone += come.add(rows)
        self.damaged |= come.damaged
        if not come.ids and not gone and not first:
            return False
        self._remove(gone + ([] if first else come.ids))
        self._insert(come)
        self._last = newest
        self._mark_mismatches(connection)
        return True

    def _remove(self, ids: Sequence[str]) -> None:
        there = [position for position in map(self.position, ids) if position is not None]
        if not there:
            return
        kept = np.ones(len(self), np.bool_)
        kept[there] = False
        self._rewrite(lambda _, old: old[kept])
        self.ids = [id for id, keep in zip(self.ids, kept.tolist(), strict=True) if keep]
        self._moved()

    def _insert(self, come: _Batch) -> None:
        if not come.ids:
            return
        # One column at a time, that is let go of in the same breath: together they fill memory several times over.
        new: dict[str, Column] = {name: np.concatenate(come.numbers.pop(name)) for name in list(come.numbers)}
        new["own"] = new["run"] == self.codes["run"].get(self.run)
        order = self._order(come, new)
        ids = [come.ids[position] for position in order]
        for name in new:
            new[name] = new[name][order]
        if not self.ids or self._key_at(len(self) - 1) < self._key(ids[0], new, 0):
            self._append(ids, new)
            return
        keys = [self._key(ids[i], new, i) for i in range(len(ids))]
        at = [bisect.bisect(range(len(self)), key, key=self._key_at) for key in keys]
        self._rewrite(lambda name, old: np.insert(old, at, new.pop(name)))
        merged, start = [], 0
        for position, id in zip(at, ids, strict=True):
            merged += self.ids[start:position]
            merged.append(id)
            start = position
        self.ids = merged + self.ids[start:]
        self._moved()

    def _rewrite(self, other: Callable[[str, Column], Column]) -> None:
        """Other values by a column's name and its old ones. One at a time: two sets of them are twice the memory."""
        for name in self._columns:
            self._columns[name] = Growing(other(name, self._columns[name].values))

    def _append(self, ids: list[str], new: Mapping[str, Column]) -> None:
        if not self.ids:
            self._columns = {name: Growing(new[name]) for name in self._columns}
        else:
            for name, column in self._columns.items():
                column.extend(new[name])
        if self._positions is not None:
            self._positions.update(zip(ids, range(len(self), len(self) + len(ids)), strict=True))
        self.ids += ids

    def _order(self, come: _Batch, new: Mapping[str, Column]) -> list[int]:
        """Of rows among themselves."""
        runs = self.codes["run"].names
        ranks = np.argsort(sorted(range(len(runs)), key=lambda code: (runs[code] == self.run, runs[code])))
        by_place = (ranks[new["run"]], new["iteration"], new["slot"])
        order = np.lexsort(by_place[::-1])
        # Rows of one place, such as imported ones, are told apart by their ids.
        alike = [np.diff(values[order]) == 0 for values in by_place]
        if np.logical_and.reduce(alike).any():
            by_id = np.argsort(sorted(range(len(come.ids)), key=come.ids.__getitem__))
            order = np.lexsort((by_id, *by_place[::-1]))
        found: list[int] = order.tolist()
        return found

    def _key(self, id: str, columns: Mapping[str, Column], at: int) -> tuple[Any, ...]:
        run = self.codes["run"].names[int(columns["run"][at])]
        return run == self.run, run, int(columns["iteration"][at]), int(columns["slot"][at]), id

    def _key_at(self, position: int) -> tuple[Any, ...]:
        return self._key(self.ids[position], self.columns, position)

    def _mark_mismatches(self, connection: sa.Connection) -> None:
        """What makes rows of whole runs incomparable; runs are few, and known before their rows."""
        found = run_mismatches(connection, self.run)
        shared = [name for name in found if name in self._run_mismatch]
        if any(found[name] != self._run_mismatch[name] for name in shared):
            self.layout += 1
        self._run_mismatch = found
        self._of_run = np.array([named(found, name, "trajectories.run") for name in self.codes["run"].names], np.int64)

    def mismatches(self, rows: slice) -> npt.NDArray[np.int64]:
        """Bits by `comparable.MISMATCHES`: what keeps rows from being compared with the run's own."""
        columns = self.columns
        bits: npt.NDArray[np.int64] = columns["mismatch"][rows] | self._of_run[columns["run"][rows]]
        return bits

    def _moved(self) -> None:
        self.layout += 1
        self._positions = None


class _Batch:
    """Rows on their way into the index."""

    def __init__(self, codes: Mapping[str, Codes]) -> None:
        self.ids: list[str] = []
        self.damaged: dict[str, str] = {}
        self.numbers: dict[str, list[Column]] = {name: [] for name in (*_NUMBERS, *_CODES)}
        self._codes = codes

    def add(self, columns: Sequence[Sequence[Any]]) -> list[str]:
        """The ids of those that are not eligible and so were not added."""
        good = [state == ELIGIBLE for state in columns[-1]]
        self._set_aside(columns, good)
        whole = all(good)
        for name, column in zip(("id", *_CODES), columns, strict=False):
            kept = restored_column(
                column if whole else [value for value, keep in zip(column, good, strict=True) if keep]
            )
            if name == "id":
                self.ids.extend(kept)
            else:
                # At once: the texts of all rows would take several times the room of the index.
                self.numbers[name].append(np.array(self._codes[name].of(kept), np.int64))
        for (name, (_, kind)), values in zip(_NUMBERS.items(), columns[len(_TEXTS) : -1], strict=True):
            fitting = values if whole else [value for value, keep in zip(values, good, strict=True) if keep]
            self.numbers[name].append(np.array(fitting, kind))
        return [] if whole else restored_column([id for id, keep in zip(columns[0], good, strict=True) if not keep])

    def _set_aside(self, columns: Sequence[Sequence[Any]], good: list[bool]) -> None:
        """Rows that hold what nobody wrote are not good."""
        for column, values in zip(_COLUMNS, columns, strict=False):
            kind = column.type
            if not isinstance(kind, Checked):
                continue
            fitting = kind.python_types_of(column)
            least, most = kind.bounds or (0, 0)
            if not fitting.issuperset(map(type, values)):
                wrong = [type(value) not in fitting for value in values]
            elif kind.bounds and not (least <= min(values) and max(values) <= most):
                wrong = [not least <= value <= most for value in values]
            else:
                continue
            for at in [at for at, is_wrong in enumerate(wrong) if is_wrong]:
                if column is _rows.id:
                    raise kind.damaged(values[at])
                if good[at]:
                    good[at], self.damaged[columns[0][at]] = False, kind.damaged(values[at]).reason


_COLUMNS = (*_TEXTS, *(column for column, _ in _NUMBERS.values()))
# A row at a time, types take longer than the query: they are asked a column at a time.
_PLAIN: dict[type, Any] = {ExactText: sa.Text, Whole: sa.BigInteger, Real: sa.Double, Truth: sa.SmallInteger}
_PLAIN |= {Size: sa.BigInteger, Share: sa.Double}
_QUERY = (
    sa.select(
        *(sa.type_coerce(column, _PLAIN.get(type(column.type), column.type)) for column in _COLUMNS),
        sa.type_coerce(_rows.state, sa.Text),
    )
    .join_from(trajectories, groups, _rows.group == groups.c.id)
    .execution_options(yield_per=_BATCH)
)
_ALL = _QUERY.where(_rows.state == ELIGIBLE)
_SINCE = _QUERY.where(_rows.changed > sa.bindparam("since"))


def _changed(connection: sa.Connection, *, since: int | None) -> Iterable[list[Sequence[Any]]]:
    """Columns of the rows with a greater number, in parts; None: only those that count, of all."""
    result = connection.execute(_ALL) if since is None else connection.execute(_SINCE, {"since": since})
    for part in result.partitions():
        yield list(zip(*part, strict=True))
