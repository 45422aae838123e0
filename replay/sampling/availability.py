"""How much of what a draw could take, counted before it is planned."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from replay.mixing.request import Availability, Limits
from replay.sampling.compatibility import AUTHORS, MISMATCHES, bits, names_of
from replay.sampling.groups import whole_groups
from replay.sampling.index import EligibleIndex
from replay.sampling.weights import SamplingWeights, of_source

Positions = npt.NDArray[np.intp]


def count_available(weights: SamplingWeights, limits: Limits) -> Availability:
    index = weights.index
    tasks = index.codes["task"].names
    weighty = weights.weights > 0.0
    there = np.flatnonzero(weighty)
    whole = whole_groups(np.flatnonzero(weights.mask), index.columns)
    # Of groups of which some member weighs anything.
    first = whole.first[np.logical_or.reduceat(weighty[whole.rows], whole.starts)] if len(whole) else whole.first
    sizes = index.columns["group_size"]

    def by_task(rows: Positions) -> dict[str, int]:
        counts = _within_caps(index, rows, limits)
        return {tasks[code]: int(counts[code]) for code in np.flatnonzero(counts).tolist()}

    of_source = {name: by_task(rows) for name, rows in _by_source(index, there)}
    groups = Counter((name, size) for name, rows in _by_source(index, first) for size in sizes[rows].tolist())
    all_tasks = by_task(there)
    return Availability(
        rows=sum(all_tasks.values()),
        by_source={name: sum(counts.values()) for name, counts in of_source.items()},
        by_task=all_tasks,
        by_source_task={(name, task): n for name, counts in of_source.items() for task, n in counts.items()},
        groups=dict(Counter(sizes[first].tolist())),
        by_source_groups=dict(groups),
        by_task_reward=_by_task_reward(index, there),
        unknown_priority=int(np.count_nonzero(weights.mask & weights.unknown)),
        incomparable=_incomparable(index, limits),
    )


def _by_source(index: EligibleIndex, rows: Positions) -> list[tuple[str, Positions]]:
    """Under every name a pick may call them."""
    found = []
    for column in ("source", "run"):
        codes = index.columns[column][rows]
        for code in np.unique(codes).tolist():
            name = index.codes[column].names[code]
            if column == "source" or name != index.run:
                found.append((name, rows[of_source(index, (name,), rows)]))
    return found


def _by_task_reward(index: EligibleIndex, rows: Positions) -> dict[tuple[str, float], int]:
    tasks, rewards = index.columns["task"][rows], index.columns["reward"][rows]
    values, reward = np.unique(rewards, return_inverse=True)
    pairs, counts = np.unique(tasks * max(1, len(values)) + reward, return_counts=True)
    names = index.codes["task"].names
    found = zip(pairs.tolist(), counts.tolist(), strict=True)
    return {(names[pair // len(values)], float(values[pair % len(values)])): count for pair, count in found}


def _within_caps(index: EligibleIndex, rows: Positions, limits: Limits) -> npt.NDArray[np.int64]:
    """How many of the rows one draw could take, by task code."""
    counts: npt.NDArray[np.int64]
    if limits.per_group is None:
        counts = np.bincount(index.columns["task"][rows])
    else:
        _, first, members = np.unique(index.columns["group"][rows], return_index=True, return_counts=True)
        within = np.minimum(members, limits.per_group)
        counts = np.bincount(index.columns["task"][rows[first]], weights=within).astype(np.int64)
    return counts if limits.per_task is None else np.minimum(counts, limits.per_task)


def _incomparable(index: EligibleIndex, limits: Limits) -> dict[str, int]:
    found = index.mismatches() & ~bits(limits.allow_mismatch)
    if not found.any():
        return {}
    places = [*(1 << place for place in range(len(MISMATCHES))), AUTHORS]
    counts = {names_of(place)[0]: int(np.count_nonzero(found & place)) for place in places}
    return {name: count for name, count in counts.items() if count}
