"""Which rows one draw takes: pick by pick, no row twice, within the caps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
import numpy.typing as npt

from replay.pool import Pool
from replay.request import Limits, Pick
from replay.sampling import Moment, RankedSampler, Rows, Sampler
from replay.sum_tree import SumTree, draw_some

Positions = npt.NDArray[np.intp]
WeighedGroups = tuple[list[Positions], npt.NDArray[np.float64]]


@dataclass(frozen=True)
class Chosen:
    """One row of the index that is to be drawn."""

    position: int
    probability: float | None
    """Its share of the weight that was left when its pick began, or its group's share; None: chosen by rank."""
    correction: float = 1.0
    """Of its loss, up to a factor common to the draw."""


class Selection:
    """Chooses for the picks of one draw, one after another."""

    def __init__(self, pools: Mapping[str | None, Pool], sampler: Sampler, limits: Limits, now: Moment) -> None:
        self._pools = pools
        self._sampler = sampler
        self._random = sampler.random
        self._limits = limits
        self._now = now
        self._index = next(iter(pools.values())).index
        self._columns = self._index.columns
        self._taken: list[int] = []
        self._per_task: Counter[int] = Counter()
        self._per_group: Counter[int] = Counter()
        self._whole: dict[Pick, WeighedGroups] = {}

    def begin_again(self) -> None:
        """As if nothing had been chosen; random numbers go on, and what was found out about groups is kept."""
        self._taken, self._per_task, self._per_group = [], Counter(), Counter()

    def choose(self, pick: Pick) -> list[Chosen]:
        """At most `pick.count` rows of those the pick asks for; whole groups of them for unit group."""
        if pick.unit == "group":
            return self._groups(pick)
        whole = self._pools[pick.source].tree
        with whole.restored():
            whole.put(np.unique(np.array(self._taken, np.intp)), 0.0)
            there = self._there(pick)
            tree = whole if there is None else SumTree(whole.weights[there])
            if isinstance(self._sampler, RankedSampler) and self._sampler.pool != 0:
                candidates = _through(there, self._candidates(tree, pick.count, self._sampler.pool))
                return self.best(candidates, self._sampler.scores(Rows(self._columns, candidates, self._now)), pick)
            return self._rows(tree, pick.count, there)

    def candidates(self, pick: Pick, pool: int | None) -> Positions:
        """What a ranked sampler may choose from."""
        there = self._there(pick)
        whole = self._pools[pick.source].tree
        with whole.restored():
            tree = whole if there is None else SumTree(whole.weights[there])
            return _through(there, self._candidates(tree, pick.count, pool))

    def best(self, candidates: Positions, scores: npt.NDArray[np.float64], pick: Pick) -> list[Chosen]:
        """The candidates of the lowest scores that may be drawn; one whose score is NaN never is."""
        allowed = self._pools[pick.source].mask
        chosen: list[Chosen] = []
        for at in np.argsort(scores, kind="stable").tolist():
            position = int(candidates[at])
            known = allowed[position] and not np.isnan(scores[at])
            if len(chosen) < pick.count and known and position not in self._taken and self._take([position]):
                chosen.append(Chosen(position, probability=None))
        return chosen

    def release(self, positions: Iterable[int]) -> None:
        """Rows that could not be drawn after all: they fill no cap, and are not chosen again."""
        for position in positions:
            self._per_task[int(self._columns["task"][position])] -= 1
            self._per_group[int(self._columns["group"][position])] -= 1

    def _asked(self, pick: Pick) -> npt.NDArray[np.bool_] | None:
        """Rows of the pick's task, group size and reward; None: all of them."""
        conditions = []
        if pick.task is not None:
            conditions.append(self._columns["task"] == self._index.codes["task"].get(pick.task))
        if pick.size is not None:
            conditions.append(self._columns["group_size"] == pick.size)
        if pick.reward_other_than is not None:
            conditions.append(self._columns["reward"] != pick.reward_other_than)
        return np.logical_and.reduce(conditions) if conditions else None

    def _there(self, pick: Pick) -> Positions | None:
        asked = self._asked(pick)
        return None if asked is None else np.flatnonzero(asked)

    def _rows(self, tree: SumTree, count: int, there: Positions | None) -> list[Chosen]:
        total, rows = tree.total, self._number(tree.weights)
        chosen: list[Chosen] = []
        while len(chosen) < count and tree.total > 0.0:
            found, weights = draw_some(tree, count - len(chosen), self._random)
            refused = False
            for position, weight in zip(_through(there, found).tolist(), weights.tolist(), strict=True):
                if self._take([position]):
                    chosen.append(Chosen(position, weight / total, self._correction(weight / total, rows)))
                else:
                    refused = True
            if refused:
                self._drop_full(tree, there)
        return chosen

    def _drop_full(self, tree: SumTree, there: Positions | None) -> None:
        """Rows of tasks and groups that have reached their cap."""
        for name, counts, cap in self._caps():
            full = [code for code, count in counts.items() if cap is not None and count >= cap]
            codes = self._columns[name] if there is None else self._columns[name][there]
            tree.put(np.flatnonzero(np.isin(codes, full) & (tree.weights > 0.0)), 0.0)

    def _candidates(self, tree: SumTree, count: int, pool: int | None) -> Positions:
        if pool is None:
            return self._random.permutation(np.flatnonzero(tree.weights > 0.0))
        parts = [np.zeros(0, np.intp)]
        wanted = count * pool
        while wanted > 0 and tree.total > 0.0:
            parts.append(draw_some(tree, wanted, self._random)[0])
            wanted -= len(parts[-1])
        return np.concatenate(parts)

    def _groups(self, pick: Pick) -> list[Chosen]:
        """A group can be drawn if every member may be, and weighs the mean of its members."""
        if isinstance(self._sampler, RankedSampler) and self._sampler.pool != 0:
            raise ValueError(
                f"replay.sampler must weigh rows to draw whole groups, got {self._sampler.title}, which ranks them. "
                "Use another one, or draw single rows."
            )
        members, weights = self._complete_groups(pick)
        sizes = np.fromiter(map(len, members), np.intp, len(members))
        tree, left = SumTree(weights), pick.count
        total, number = tree.total, self._number(weights)
        chosen: list[Chosen] = []
        while tree.total > 0.0:
            tree.put(np.flatnonzero((sizes > left) & (tree.weights > 0.0)), 0.0)
            if tree.total == 0.0:
                break
            (at,), (weight,) = (drawn.tolist() for drawn in draw_some(tree, 1, self._random))
            rows = members[at].tolist()
            if self._take(rows):
                correction = self._correction(weight / total, number)
                chosen += [Chosen(position, weight / total, correction) for position in rows]
                left -= len(rows)
        return chosen

    def _complete_groups(self, pick: Pick) -> WeighedGroups:
        """Positions of the members and the weight of each, in the order of their first members."""
        kind = replace(pick, count=0)
        if kind not in self._whole:
            self._whole[kind] = self._all_complete_groups(pick)
        if not self._taken:
            return self._whole[kind]
        members, weights = self._whole[kind]
        broken = set(self._columns["group"][self._taken].tolist())
        codes = self._columns["group"][[rows[0] for rows in members]].tolist() if members else []
        left = np.array([code not in broken for code in codes], np.bool_)
        return list(compress(members, left)), weights[left]

    def _all_complete_groups(self, pick: Pick) -> WeighedGroups:
        """As they are while nothing is taken."""
        pool = self._pools[pick.source]
        asked = self._asked(pick)
        members = complete_groups(np.flatnonzero(pool.mask if asked is None else pool.mask & asked), self._columns)
        return members, _mean_weights(members, pool.tree.weights)

    def _take(self, positions: list[int]) -> bool:
        """All of them or none, if the caps allow it."""
        capped = self._limits.per_task is not None or self._limits.per_group is not None
        if capped:
            for name, counts, cap in self._caps():
                codes = Counter(self._columns[name][positions].tolist())
                if cap is not None and any(counts[code] + more > cap for code, more in codes.items()):
                    return False
            for name, counts, _ in self._caps():
                counts.update(self._columns[name][positions].tolist())
        self._taken += positions
        return True

    def _caps(self) -> tuple[tuple[str, Counter[int], int | None], ...]:
        return (
            ("task", self._per_task, self._limits.per_task),
            ("group", self._per_group, self._limits.per_group),
        )

    def _number(self, weights: npt.NDArray[np.float64]) -> int:
        """Of rows that could be drawn; counted for samplers that ask for it."""
        return int(np.count_nonzero(weights)) if type(self._sampler).correction is not Sampler.correction else 0

    def _correction(self, probability: float, rows: int) -> float:
        return self._sampler.correction(probability, rows)


def complete_groups(positions: Positions, columns: Mapping[str, npt.NDArray[np.int64]]) -> list[Positions]:
    """Those of the rows that make up whole groups, group by group, in the order of their first members."""
    codes, sizes = columns["group"][positions], columns["group_size"][positions]
    _, first, inverse, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    complete = np.flatnonzero(counts == sizes[first])
    by_group = positions[np.argsort(inverse, kind="stable")]
    ends = np.cumsum(counts)
    ordered = complete[np.argsort(first[complete])]
    return [by_group[ends[group] - counts[group] : ends[group]] for group in ordered.tolist()]


def _mean_weights(members: Sequence[Positions], weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of each group; many of one size at once."""
    means = np.empty(len(members))
    sizes = np.fromiter(map(len, members), np.intp, len(members))
    for size in np.unique(sizes).tolist():
        alike = np.flatnonzero(sizes == size)
        together = np.concatenate([members[at] for at in alike.tolist()]).reshape(-1, size)
        means[alike] = weights[together].mean(axis=1)
    return means


def _through(there: Positions | None, positions: Positions) -> Positions:
    return positions if there is None else there[positions]
