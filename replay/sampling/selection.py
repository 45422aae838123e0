"""The choice of rows within one draw: pick by pick, no row twice, within the caps per task and per group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from replay.mixing.request import DrawRequest, Pick
from replay.sampling.base_sampler import Sampler
from replay.sampling.samplers import EntropySampler
from replay.sampling.weights import EligibleRows, Weights

Positions = npt.NDArray[np.intp]


@dataclass(frozen=True)
class SelectedRow:
    """A row of the index that was chosen for the draw."""

    position: int
    probability: float | None
    """The share of the row, or of its group, in the weight that was left when its pick began. None: chosen by rank."""
    correction: float = 1.0
    """The weight of the row's loss, up to a factor common to the draw."""


class Selection:
    """A selection chooses rows for the picks of one request. Raises ReplayError for a source that can't be compared."""

    def __init__(self, eligible: EligibleRows, request: DrawRequest, sampler: Sampler) -> None:
        self._by_source = eligible.weigh_for_picks(request, sampler)
        self._sampler, self._random = sampler, sampler.random
        self._index = eligible.index
        self._columns = self._index.columns
        self._taken: list[int] = []
        self._counts: dict[str, Counter[int]] = {"task": Counter(), "group": Counter()}
        self._caps = {"task": request.limits.per_task, "group": request.limits.per_group}
        self._whole: dict[Pick, tuple[WholeGroups, Weights]] = {}

    def choose(self, pick: Pick) -> list[SelectedRow]:
        """Choose at most `pick.count` of the rows that fit the pick; for the unit `group`, whole groups."""
        if pick.unit == "group":
            return self._groups(pick)
        if isinstance(self._sampler, EntropySampler):
            return self._surest(pick, pool=self._sampler.options.pool)
        there, weights = self._left(pick)
        chosen: list[int] = []
        for at in draw_in_turn(weights, pick.count, self._random):
            if len(chosen) == pick.count:
                break
            if self._take([int(there[at])]):
                chosen.append(at)
        shares, number = (weights[chosen] / weights.sum()).tolist(), int(np.count_nonzero(weights))
        corrections = [self._sampler.correction(share, number) for share in shares]
        return [SelectedRow(*row) for row in zip(there[chosen].tolist(), shares, corrections, strict=True)]

    def _surest(self, pick: Pick, *, pool: int) -> list[SelectedRow]:
        """Choose the rows of lowest mean entropy from `pool` random candidates per requested row."""
        there, weights = self._left(pick)
        drawn = list(islice(draw_in_turn(weights, pick.count * pool, self._random), pick.count * pool))
        candidates = there[np.array(drawn, np.intp)]
        chosen: list[SelectedRow] = []
        for at in np.argsort(self._columns["mean_entropy"][candidates], kind="stable").tolist():
            position = int(candidates[at])
            if len(chosen) < pick.count and self._take([position]):
                chosen.append(SelectedRow(position, probability=None))
        return chosen

    def release(self, positions: Iterable[int]) -> None:
        """Stop counting rows against the caps that could not be read. They are not chosen again."""
        for position in positions:
            for name, counts in self._counts.items():
                counts[int(self._columns[name][position])] -= 1

    def _asked(self, pick: Pick) -> npt.NDArray[np.bool_] | None:
        """Return a mask of the rows that have the pick's task and group size. None: all rows fit."""
        columns, conditions = self._columns, []
        if pick.task is not None:
            conditions.append(columns["task"] == self._index.codes["task"].get(pick.task))
        if pick.size is not None:
            conditions.append(columns["group_size"] == pick.size)
        return np.logical_and.reduce(conditions) if conditions else None

    def _left(self, pick: Pick) -> tuple[Positions, Weights]:
        """Return the rows that fit the pick and are not chosen yet, and their weights."""
        weights, asked = self._by_source[pick.source].weights, self._asked(pick)
        if self._taken:
            weights = weights.copy()
            weights[self._taken] = 0.0
        there = np.flatnonzero(weights if asked is None else (weights > 0.0) & asked)
        return there, weights[there]

    def _groups(self, pick: Pick) -> list[SelectedRow]:
        """Choose whole groups. A group weighs the mean of its members, every one of which must be drawable."""
        if isinstance(self._sampler, EntropySampler):
            raise ValueError(
                f"replay.sampler must weigh rows to draw whole groups, got {self._sampler.title}, which ranks them. "
                "Use another one, or draw single rows."
            )
        groups, weights = self._complete_groups(pick)
        left, total, number = pick.count, float(weights.sum()), int(np.count_nonzero(weights))
        chosen: list[SelectedRow] = []
        for at in draw_in_turn(weights, -(-pick.count // max(1, pick.size or 1)), self._random):
            rows = groups.members(at).tolist()
            if len(rows) <= left and self._take(rows):
                share = float(weights[at]) / total
                correction = self._sampler.correction(share, number)
                chosen += [SelectedRow(position, share, correction) for position in rows]
                left -= len(rows)
            if left == 0:
                break
        return chosen

    def _complete_groups(self, pick: Pick) -> tuple[WholeGroups, Weights]:
        """Return the complete groups that are left for the pick, and the weight of each."""
        every, kind = self._by_source[pick.source], replace(pick, count=0)
        if kind not in self._whole:
            asked = self._asked(pick)
            fits = every.mask if asked is None else every.mask & asked
            there = find_whole_groups(np.flatnonzero(fits), self._columns)
            self._whole[kind] = there, there.mean_by_group(every.weights)
        groups, weights = self._whole[kind]
        if not self._taken:
            return groups, weights
        codes = self._columns["group"]
        left = ~np.isin(codes[groups.first], codes[self._taken])
        return groups.keep(left), weights[left]

    def _take(self, positions: list[int]) -> bool:
        """Take all of the rows if the caps allow it, or none. Returns whether they were taken."""
        if any(cap is not None for cap in self._caps.values()):
            more = {name: Counter(self._columns[name][positions].tolist()) for name in self._caps}
            for name, cap in self._caps.items():
                if cap is not None and any(self._counts[name][code] + n > cap for code, n in more[name].items()):
                    return False
            for name, codes in more.items():
                self._counts[name].update(codes)
        self._taken += positions
        return True


def draw_in_turn(weights: Weights, first: int, random: np.random.Generator) -> Iterator[int]:
    """Yield all positions of weight > 0, each drawn in proportion to the weights that are left.

    This is an exponential race (Efraimidis and Spirakis 2006): random waiting times are divided by the weights, and
    the earliest position comes first. The `first` positions are found without sorting the others.
    """
    there = np.flatnonzero(weights > 0.0)
    with np.errstate(over="ignore"):
        times = random.standard_exponential(len(there)) / weights[there]
    if 0 < first < len(there):
        earliest = np.argpartition(times, first - 1)
        early, late = earliest[:first], earliest[first:]
        yield from there[early[np.argsort(times[early])]].tolist()
        there, times = there[late], times[late]
    yield from there[np.argsort(times)].tolist()


@dataclass(frozen=True)
class WholeGroups:
    """The [G] groups whose members are all among some rows, ordered by their first members."""

    rows: Positions
    """[N]: the positions of all members, group after group."""
    starts: Positions
    """[G]: the index in `rows` at which each group begins."""
    sizes: Positions
    """[G]: the number of members of each group."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def first(self) -> Positions:
        """[G]: the first member of each group."""
        return self.rows[self.starts]

    def members(self, at: int) -> Positions:
        start = self.starts[at]
        return self.rows[start : start + self.sizes[at]]

    def keep(self, kept: npt.NDArray[np.bool_]) -> WholeGroups:
        """Return the groups where the mask [G] is True. `rows` stays as it is."""
        return WholeGroups(self.rows, self.starts[kept], self.sizes[kept])

    def mean_by_group(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the mean [G] of each group's members. `values` are of all rows in the index."""
        means = np.empty(len(self))
        for size in np.unique(self.sizes).tolist():
            alike = np.flatnonzero(self.sizes == size)
            means[alike] = values[self.rows[self.starts[alike][:, None] + np.arange(size)]].mean(axis=1)
        return means


def find_whole_groups(positions: Positions, columns: Mapping[str, npt.NDArray[np.int64]]) -> WholeGroups:
    """Find the groups of which all members are among the rows at `positions`, which ascend."""
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
