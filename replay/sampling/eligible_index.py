"""An in-memory index of the rows that a run may draw. A refresh reads only what changed since the last one."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.errors import DamagedDatabase
from replay.records import ELIGIBLE
from replay.sampling.compatibility import run_mismatches, sampling_mismatch
from replay.storage.counters import last_number
from replay.storage.format.column_types import restored_column
from replay.storage.format.schema import IMPORTED, groups, trajectories
from replay.storage.tombstones import reclaimed_between

Column = npt.NDArray[Any]

_BATCH = 5_000
_FIRST = -(1 << 63)
"""A change number below that of any row. Asking for greater ones makes the database use its index for all rows."""
_rows = trajectories.c

# These columns are read without SQLAlchemy's types: converting row by row takes longer than the query.
_TEXTS = (_rows.id, _rows.run, _rows.source, _rows.task, _rows.group)
_NUMBERS: dict[str, tuple[sa.ColumnElement[Any], type]] = {
    "iteration": (_rows.iteration, np.int64),
    "slot": (_rows.slot, np.int64),
    "success": (_rows.success, np.bool_),
    "reward": (_rows.reward, np.float64),
    "advantage": (_rows.advantage, np.float64),
    "policy_version": (_rows.policy_version_min, np.int64),
    "num_action_tokens": (_rows.num_action_tokens, np.int64),
    "longest_segment": (_rows.longest_segment, np.int64),
    "mean_entropy": (_rows.mean_entropy, np.float64),
    "group_size": (groups.c.size, np.int64),
    "group_success_rate": (groups.c.success_rate, np.float64),
    "group_reward_std": (groups.c.reward_std, np.float64),
    "mismatch": (sampling_mismatch(_rows), np.int64),
    "uses": (_rows.uses, np.int64),
}
_CODES = ("run", "source", "task", "group")


class Codes:
    """Small numbers in place of texts, in the order in which the texts first came."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._codes: dict[str, int] = {}

    def codes_for(self, names: Iterable[str]) -> list[int]:
        codes = self._codes
        found = [codes.setdefault(name, len(codes)) for name in names]
        self.names += [*islice(reversed(codes), len(codes) - len(self.names))][::-1]
        return found

    def get(self, name: str) -> int:
        """Return the code of a name, or -1 if no row has the name."""
        return self._codes.get(name, -1)


class EligibleIndex:
    """The eligible rows that a run may draw: its own and imported ones.

    The order of rows depends only on their content, so that a draw depends neither on clocks nor on earlier refreshes.
    Imported rows come first, by run. Within a run, rows are ordered by iteration, slot and id. New rows of the
    drawing run are therefore appended at the end.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.ids: list[str] = []
        self.codes = {name: Codes() for name in _CODES}
        self.columns: dict[str, Column] = _Batch(self.codes).columns()
        """Columns by name, [N] each. Others must only read them."""
        self._mark_own()
        self._last = -1
        self._all, self._since = _queries(run)
        self._mismatch_of_run = np.zeros(0, np.int64)
        self._positions: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_new(self) -> bool:
        """True before the first refresh, which reads all rows."""
        return self._last < 0

    def position(self, id: str) -> int | None:
        """Return the row's position, or None if no eligible row has the id."""
        if self._positions is None:
            self._positions = {name: position for position, name in enumerate(self.ids)}
        return self._positions.get(id)

    def refresh(self, connection: sa.Connection) -> bool:
        """Take over everything that changed since the last refresh. Returns whether anything had changed."""
        newest = last_number(connection, "changed")
        if newest < self._last:
            raise DamagedDatabase(f"{newest} after {self._last} in buffer_state.value of 'changed'")
        if newest == self._last:
            return False
        is_first, come, gone = self.is_new, _Batch(self.codes), list[str]()
        # Change numbers are assigned in order, under a lock, so no smaller number can appear after a seen one. A number
        # above the newest is damage. It is ignored, since it would hide all later changes.
        between = {} if is_first else {"since": self._last, "newest": newest}
        for part in connection.execute(self._all if is_first else self._since, between).partitions(_BATCH):
            gone += come.add(list(zip(*part, strict=True)))
        if not is_first:
            gone += reclaimed_between(connection, self._last, newest)
        mismatches = run_mismatches(connection, self.run, self.codes["run"].names)
        # No query follows: if one above fails, the index is unchanged and the refresh can be repeated.
        self._last = newest
        if come.ids or gone:
            del self.columns["own"]
            self._remove(gone)
            self._put(come.ids, come.columns())
            self._mark_own()
        self._mismatch_of_run = np.array([mismatches[name] for name in self.codes["run"].names], np.int64)
        return True

    def _remove(self, gone: Sequence[str]) -> None:
        places = [place for place in map(self.position, gone) if place is not None]
        if places:
            kept = np.ones(len(self), np.bool_)
            kept[places] = False
            self._take(np.flatnonzero(kept))

    def _put(self, ids: list[str], values: dict[str, Column]) -> None:
        """Update known rows with these values, and add the other rows."""
        at = [self.position(id) for id in ids] if self.ids else [None] * len(ids)
        is_new = np.array([place is None for place in at], np.bool_)
        places = np.array([place for place in at if place is not None], np.intp)
        for name, column in self.columns.items():
            column[places] = values[name][~is_new]
            values[name] = values[name][is_new]
        ids = [id for id, place in zip(ids, at, strict=True) if place is None]
        if ids:
            self._append(ids, values)

    def _append(self, ids: list[str], values: dict[str, Column]) -> None:
        end, order = len(self), self._ordered(ids, values)
        ids = [ids[place] for place in order.tolist()]
        for name in self.columns:  # one at a time, to save memory
            self.columns[name] = np.concatenate([self.columns[name], values.pop(name)[order]])
        if self._positions is not None:
            self._positions.update(zip(ids, range(end, end + len(ids)), strict=True))
        self.ids += ids
        if end and self._key(end - 1) > self._key(end):
            self._take(self._ordered(self.ids, self.columns))

    def _take(self, places: npt.NDArray[np.intp]) -> None:
        """Keep only these rows, in this order."""
        for name in self.columns:
            self.columns[name] = self.columns[name][places]
        self.ids = [self.ids[place] for place in places.tolist()]
        self._positions = None

    def _key(self, at: int) -> tuple[Any, ...]:
        name = self.codes["run"].names[self.columns["run"][at]]
        return name == self.run, name, self.columns["iteration"][at], self.columns["slot"][at], self.ids[at]

    def _mark_own(self) -> None:
        self.columns["own"] = self.columns["run"] == self.codes["run"].get(self.run)

    def _ordered(self, ids: Sequence[str], columns: Mapping[str, Column]) -> npt.NDArray[np.intp]:
        """Return the indices that sort the rows."""
        names = self.codes["run"].names
        ranks = np.argsort(sorted(range(len(names)), key=lambda code: (names[code] == self.run, names[code])))
        by_place = [ranks[columns["run"]], columns["iteration"], columns["slot"]]
        order = np.lexsort(by_place[::-1])
        # Ids are compared only if rows share run, iteration and slot, as imported rows may.
        alike = [np.diff(values[order]) == 0 for values in by_place]
        if np.logical_and.reduce(alike).any():
            by_id = np.argsort(sorted(range(len(ids)), key=ids.__getitem__))
            order = np.lexsort((by_id, *by_place[::-1]))
        return order

    def mismatches(self) -> npt.NDArray[np.int64]:
        """Return the difference bits [N] of all rows (`compatibility.DIFFERENCES`)."""
        bits: npt.NDArray[np.int64] = self.columns["mismatch"] | self._mismatch_of_run[self.columns["run"]]
        return bits


class _Batch:
    """Rows that were read and are to be put into the index."""

    def __init__(self, codes: Mapping[str, Codes]) -> None:
        self.ids: list[str] = []
        self._parts: dict[str, list[Column]] = {
            **{name: [np.empty(0, kind)] for name, (_, kind) in _NUMBERS.items()},
            **{name: [np.empty(0, np.int64)] for name in _CODES},
        }
        self._codes = codes

    def columns(self) -> dict[str, Column]:
        """Return the columns of all added rows, by name. The parts are freed meanwhile, to save memory."""
        return {name: np.concatenate(self._parts.pop(name)) for name in list(self._parts)}

    def add(self, columns: Sequence[Sequence[Any]]) -> list[str]:
        """Add the eligible rows. Returns the ids of the other rows."""
        good = [state == ELIGIBLE for state in columns[-1]]
        left_out: list[str] = []
        if not all(good):
            left_out += restored_column(_rows.id, [id for id, keep in zip(columns[0], good, strict=True) if not keep])
            columns = [[value for value, keep in zip(values, good, strict=True) if keep] for values in columns]
        for name, text, values in zip(("id", *_CODES), _TEXTS, columns, strict=False):
            kept = restored_column(text, values)
            if name == "id":
                self.ids.extend(kept)
            else:
                # Texts become codes at once: the texts of all rows would need several times the memory of the index.
                self._parts[name].append(np.array(self._codes[name].codes_for(kept), np.int64))
        for (name, (_, kind)), values in zip(_NUMBERS.items(), columns[len(_TEXTS) : -1], strict=True):
            self._parts[name].append(np.array(values, kind))
        return left_out


def _queries(run: str) -> tuple[sa.CompoundSelect[*tuple[Any, ...]], sa.CompoundSelect[*tuple[Any, ...]]]:
    """Return two queries about a run's own and imported rows: for all eligible rows, and for rows that changed.

    Each is a union, so that every part can use an index of the database.
    """
    columns = (*_TEXTS, *(column for column, _ in _NUMBERS.values()), _rows.state)
    query = sa.select(*(sa.type_coerce(column, sa.types.NullType()) for column in columns))
    query = query.join_from(trajectories, groups, _rows.group == groups.c.id)
    imported = query.where(sa.text(IMPORTED), _rows.run != run)
    parts = [query.where(_rows.run == run), imported]
    # An expression keeps the database from using the index of states, which covers the rows of all runs.
    state = sa.func.coalesce(sa.type_coerce(_rows.state, sa.Text), "")
    eligible = sa.union_all(*(part.where(_rows.changed >= _FIRST, state == ELIGIBLE) for part in parts))
    some = (_rows.changed > sa.bindparam("since"), _rows.changed <= sa.bindparam("newest"))
    return eligible.execution_options(yield_per=_BATCH), sa.union_all(*(part.where(*some) for part in parts))
