"""The rows a run may draw, in memory: columns that follow the database a change at a time."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.errors import DamagedCell
from replay.records import ELIGIBLE
from replay.sampling.compatibility import run_mismatches, sampling_mismatch
from replay.storage.counters import last_number
from replay.storage.format.column_types import (
    ESCAPE,
    Checked,
    ExactText,
    Real,
    Share,
    Size,
    Truth,
    Whole,
    restored_column,
)
from replay.storage.format.rows import named
from replay.storage.format.schema import IMPORTED, groups, trajectories
from replay.storage.reclaimed import reclaimed_between

Column = npt.NDArray[Any]

_BATCH = 5_000
_FIRST = -(1 << 63)
"""At most any number of a row: so an index of these numbers is used for all rows, too."""
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
    "uses": (_rows.uses, np.int64),
}
_CODES = ("run", "source", "task", "group")


class Codes:
    """Small numbers in place of texts, in the order they came."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = list(names)
        self._codes = {name: code for code, name in enumerate(self.names)}

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
    """The eligible rows that a run may draw: its own, those that were imported, and those of runs that it names.

    Rows stand in an order that depends on their content alone: those of other runs first, by run; within a run by
    iteration, slot and id. So what the drawing run collects is added at the end, and row order, clocks and the
    history of refreshes leave no trace in a draw.
    """

    def __init__(self, run: str, others: Collection[str] = ()) -> None:
        """`others`: the runs that are named; names of anything else do no harm."""
        self.run = run
        self.ids: list[str] = []
        self.layout = 0
        """Grows when rows have moved, or facts about them have changed; rows added at the end change nothing, and how
        often a row was used is no fact about it."""
        self.codes = {name: Codes() for name in _CODES}
        self._columns = {name: GrowableArray(np.empty(0, kind)) for name, (_, kind) in _NUMBERS.items()}
        self._columns |= {name: GrowableArray(np.empty(0, np.int64)) for name in _CODES}
        self._columns["own"] = GrowableArray(np.empty(0, np.bool_))
        self._last = -1
        self._all, self._since = _queries(dict.fromkeys((run, *others)))
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
        return self._last >= 0

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
        newest = last_number(connection, "changed")
        if newest < self._last:
            raise DamagedCell("buffer_state.value of 'changed'", f"not fall below {self._last}", str(newest))
        if newest == self._last:
            return False
        come, gone = _Batch(self.codes), []
        for rows in self._changed(connection, newest):
            gone += come.add(rows)
        if self.is_filled:
            gone += reclaimed_between(connection, self._last, newest)
        self.damaged |= come.damaged
        names = self.codes["run"].names
        mismatches = run_mismatches(connection, self.run, names)
        # Nothing is asked of the database from here on: a refresh that fails there can be made again.
        first, self._last = not self.is_filled, newest
        if come.ids or gone:
            columns = come.columns()
            columns["own"] = columns["run"] == self.codes["run"].get(self.run)
            ids = come.ids if first else self._removed(come.ids, columns, gone)
            self._insert(ids, columns)
            self._drop_unused_names()
        self._mark_mismatches(mismatches)
        return bool(first or come.ids or gone)

    def _changed(self, connection: sa.Connection, newest: int) -> Iterator[list[Sequence[Any]]]:
        """Columns of the rows, in parts; the first time only of those that count.

        Numbers are handed out in order, under a lock: one that is seen has no smaller one still to come. A greater one
        than the newest is damage, which must not hide what is still to come.
        """
        if self.is_filled:
            result = connection.execute(self._since, {"since": self._last, "newest": newest})
        else:
            result = connection.execute(self._all)
        for part in result.partitions(_BATCH):
            yield list(zip(*part, strict=True))

    def _removed(self, ids: list[str], columns: dict[str, Column], gone: list[str]) -> list[str]:
        """Takes out rows that are gone or have changed; the ids and `columns` of those that are to be put in."""
        at = [self.position(id) for id in ids]
        there = np.array([position is not None for position in at], np.bool_)
        places = np.array([position for position in at if position is not None], np.intp)
        same = np.ones(len(places), np.bool_)
        for name, column in self._columns.items():
            new, old = columns[name][there], column.values[places]
            if name == "uses":
                column.values[places] = new
            else:
                same &= (new == old) | ((new != new) & (old != old))
        changed = places[~same].tolist()
        self._remove([*changed, *(place for place in map(self.position, gone) if place is not None)])
        put = ~there
        put[np.flatnonzero(there)[~same]] = True
        for name in columns:
            columns[name] = columns[name][put]
        return [id for id, kept in zip(ids, put.tolist(), strict=True) if kept]

    def _remove(self, places: Sequence[int]) -> None:
        if not places:
            return
        kept = np.ones(len(self), np.bool_)
        kept[places] = False
        self._rewrite(lambda _, old: old[kept])
        self.ids = [id for id, keep in zip(self.ids, kept.tolist(), strict=True) if keep]
        self._moved()

    def _insert(self, ids: list[str], new: dict[str, Column]) -> None:
        if not ids:
            return
        order = self._order(ids, new)
        ids = [ids[position] for position in order]
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

    def _drop_unused_names(self) -> None:
        """Names that no row has any more go when they are more than half of all: each is looked at a few times only."""
        for name in _CODES:
            if len(self.codes[name].names) > 2 * len(self):
                used, codes = np.unique(self._columns[name].values, return_inverse=True)
                self._columns[name] = GrowableArray(codes.astype(np.int64))
                self.codes[name] = Codes(map(self.codes[name].names.__getitem__, used.tolist()))

    def _rewrite(self, other: Callable[[str, Column], Column]) -> None:
        """Other values by a column's name and its old ones. One at a time: two sets of them are twice the memory."""
        for name in self._columns:
            self._columns[name] = GrowableArray(other(name, self._columns[name].values))

    def _append(self, ids: list[str], new: Mapping[str, Column]) -> None:
        if not self.ids:
            self._columns = {name: GrowableArray(new[name]) for name in self._columns}
        else:
            for name, column in self._columns.items():
                column.extend(new[name])
        if self._positions is not None:
            self._positions.update(zip(ids, range(len(self), len(self) + len(ids)), strict=True))
        self.ids += ids

    def _order(self, ids: list[str], new: Mapping[str, Column]) -> list[int]:
        """The places of rows among themselves."""
        runs = self.codes["run"].names
        ranks = np.argsort(sorted(range(len(runs)), key=lambda code: (runs[code] == self.run, runs[code])))
        by_place = (ranks[new["run"]], new["iteration"], new["slot"])
        order = np.lexsort(by_place[::-1])
        # Rows of one place, such as imported ones, are distinguished by their ids.
        alike = [np.diff(values[order]) == 0 for values in by_place]
        if np.logical_and.reduce(alike).any():
            by_id = np.argsort(sorted(range(len(ids)), key=ids.__getitem__))
            order = np.lexsort((by_id, *by_place[::-1]))
        found: list[int] = order.tolist()
        return found

    def _key(self, id: str, columns: Mapping[str, Column], at: int) -> tuple[Any, ...]:
        run = self.codes["run"].names[int(columns["run"][at])]
        return run == self.run, run, int(columns["iteration"][at]), int(columns["slot"][at]), id

    def _key_at(self, position: int) -> tuple[Any, ...]:
        return self._key(self.ids[position], self.columns, position)

    def _mark_mismatches(self, found: Mapping[str, int]) -> None:
        """What makes rows of whole runs incomparable."""
        shared = [name for name in found if name in self._run_mismatch]
        if any(found[name] != self._run_mismatch[name] for name in shared):
            self.layout += 1
        self._run_mismatch = dict(found)
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

    def columns(self) -> dict[str, Column]:
        """By name, of all that were added. Parts are let go of: both together would fill memory twice over."""
        return {name: np.concatenate(self.numbers.pop(name) or [np.empty(0)]) for name in list(self.numbers)}

    def add(self, columns: Sequence[Sequence[Any]]) -> list[str]:
        """The ids of those that are not eligible and so were not added."""
        good = [state == ELIGIBLE for state in columns[-1]]
        self._set_aside(columns, good)
        whole = all(good)
        for name, text, column in zip(("id", *_CODES), _TEXTS, columns, strict=False):
            fitting = column if whole else [value for value, keep in zip(column, good, strict=True) if keep]
            kept = restored_column(text, fitting)
            if name == "id":
                self.ids.extend(kept)
            else:
                # At once: the texts of all rows would take several times the room of the index.
                self.numbers[name].append(np.array(self._codes[name].of(kept), np.int64))
        for (name, (_, kind)), values in zip(_NUMBERS.items(), columns[len(_TEXTS) : -1], strict=True):
            fitting = values if whole else [value for value, keep in zip(values, good, strict=True) if keep]
            self.numbers[name].append(np.array(fitting, kind))
        if whole:
            return []
        left_out = [id for id, keep in zip(columns[0], good, strict=True) if not keep]
        return [*restored_column(_rows.id, left_out)]

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
            elif isinstance(kind, ExactText) and ESCAPE in "".join(filter(None, values)):
                wrong = [not kind.holds(value) for value in values]
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


def _queries(runs: Iterable[str]) -> tuple[sa.CompoundSelect[Any], sa.CompoundSelect[Any]]:
    """Queries for the eligible rows of these runs and imported ones, and for what has changed among all of those.

    Each part of the union finds its rows by an index: rows of other runs are not looked at.
    """
    listed = list(runs)
    query = sa.select(
        *(sa.type_coerce(column, _PLAIN.get(type(column.type), column.type)) for column in _COLUMNS),
        sa.type_coerce(_rows.state, sa.Text),
    ).join_from(trajectories, groups, _rows.group == groups.c.id)
    imported = query.where(sa.text(IMPORTED), _rows.run.not_in(listed))
    parts = [*(query.where(_rows.run == run) for run in listed), imported]
    # As an expression: the index of states would find the rows of all runs.
    state = sa.func.coalesce(sa.type_coerce(_rows.state, sa.Text), "")
    eligible = sa.union_all(*(part.where(_rows.changed >= _FIRST, state == ELIGIBLE) for part in parts))
    some = (_rows.changed > sa.bindparam("since"), _rows.changed <= sa.bindparam("newest"))
    return eligible.execution_options(yield_per=_BATCH), sa.union_all(*(part.where(*some) for part in parts))


class GrowableArray:
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
