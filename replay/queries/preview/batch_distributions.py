"""How the rows of a batch are spread beside those of the whole buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from replay.queries.filters.query import QueryResult
from replay.queries.preview.run_state import RunState
from replay.records import age_bucket
from replay.sampling.index import EligibleIndex

_MOST_VALUES = 12
"""Different numbers that are shown one by one; more of them are shown in ranges."""
_RANGES = 10

Numbers = npt.NDArray[Any]
Bins = tuple[list[str], npt.NDArray[np.int64]]
"""Labels, and the place of each row's [N]."""


def spreads(index: EligibleIndex, draws: Sequence[Sequence[int]], now: RunState) -> list[QueryResult]:
    """The share of each bin of staleness, reward, difficulty and source among the rows of all draws, and of all rows.

    `draws` are positions in the index. Difficulty is the success rate of the group a row was collected in.
    """
    drawn = np.array([position for rows in draws for position in rows], np.intp)
    columns = index.columns
    found = []
    for name, bins in (
        ("staleness", _ages(columns["own"], now.policy_version - columns["policy_version"])),
        ("reward", _numbers(columns["reward"])),
        ("difficulty", _numbers(columns["group_success_rate"], least=0.0, most=1.0)),
        ("source", _sources(index)),
    ):
        labels, places = bins
        whole = np.bincount(places, minlength=len(labels))
        part = np.bincount(places[drawn], minlength=len(labels))
        found.append(
            {
                "name": name,
                "bins": [
                    {"label": label, "rows": all, "buffer": _share(all, len(places)), "batch": _share(some, len(drawn))}
                    for label, all, some in zip(labels, whole.tolist(), part.tolist(), strict=True)
                ],
            }
        )
    return found


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _ages(own: npt.NDArray[np.bool_], staleness: Numbers) -> Bins:
    """Buckets that double, as the metrics of ages have them; the last is of rows of other runs, if there are any."""
    highest = int(staleness[own].max(initial=0))
    ages = [0, 1, *(1 << power for power in range(1, max(1, highest).bit_length()))]
    ages = [age for age in ages if age <= highest]
    places = np.searchsorted(ages, np.maximum(staleness, 0), side="right") - 1
    labels = [age_bucket(age) for age in ages]
    if own.all():
        return labels, places.astype(np.int64)
    return [*labels, age_bucket(None)], np.where(own, places, len(labels))


def _numbers(values: Numbers, *, least: float | None = None, most: float | None = None) -> Bins:
    """One bin per value if there are few, else ranges of one width."""
    different, places = np.unique(values, return_inverse=True)
    if len(different) <= _MOST_VALUES:
        return [f"{value:.3g}" for value in different.tolist()], places.astype(np.int64)
    low = float(different[0]) if least is None else least
    high = float(different[-1]) if most is None else most
    edges = np.linspace(low, high, _RANGES + 1)
    labels = [f"{a:.3g} to {b:.3g}" for a, b in pairwise(edges)]
    return labels, np.clip(np.searchsorted(edges, values, side="right") - 1, 0, _RANGES - 1).astype(np.int64)


def _sources(index: EligibleIndex) -> Bins:
    codes = index.columns["source"]
    return list(index.codes["source"].names), codes
