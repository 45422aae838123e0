"""A trial of the next draw: how many rows it could take, how many each limit excludes, why a source gives none."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from context.wording import nearest
from replay.mixing.mix_settings import SAME_TASK, Unit
from replay.mixing.request import Availability, DrawRequest, Limits, Pick
from replay.records import OWN_SOURCES
from replay.sampling.base_sampler import Sampler
from replay.sampling.compatibility import DIFFERENCES, difference_bits
from replay.sampling.eligible_index import EligibleIndex
from replay.sampling.selection import Positions, SelectedRow, Selection, find_whole_groups
from replay.sampling.weights import TOO_LONG, EligibleRows, SamplingWeights, apply_limits, match_sources


class TrialDraw:
    """A trial answers questions about the next draw, and writes nothing. It holds until the buffer is refreshed."""

    def __init__(self, eligible: EligibleRows, request: DrawRequest, sampler: Sampler) -> None:
        self.index = eligible.index
        self._eligible = eligible
        self._request = request
        self._sampler = sampler
        self._weights = eligible.weigh(request, sampler, None)
        self._drawable = self._weights.weights > 0.0

    def available(self) -> Availability:
        """Count the rows that a draw could take. Raises ReplayError for a named source without a comparable row."""
        self._eligible.refuse_incomparable(self._request)
        return _count_available(self.index, self._weights, self._request.limits)

    def count_left_by_rule(self) -> list[tuple[str, int]]:
        """Return the number of rows left after each rule, in the order of the rules; the first entry counts all rows.

        A rule is a key of `replay`, or `context.max_tokens`. `iteration` excludes rows of this and later iterations,
        `sampler` those without a weight.
        """
        kept = np.ones(len(self.index), np.bool_)
        found = [("eligible", len(kept))]
        for name, allowed in apply_limits(self._eligible, self._request):
            kept &= allowed
            found.append((name, int(np.count_nonzero(kept))))
        return [*found, ("sampler", int(np.count_nonzero(self._drawable)))]

    def empty_sources(self, unit: Unit, group_size: int, named: Iterable[str] = ()) -> list[str]:
        """Return a sentence for each source that has no row to draw.

        Checked are the sources of `replay.sources`, or else of all rows, and the sources `named`. The run's own sources
        are left out while they are empty, because the run may still collect rows.
        """
        codes = self.index.codes["source"].names
        known = sorted({codes[code] for code in np.unique(self.index.columns["source"]).tolist()})
        asked = self._request.limits.sources
        names = dict.fromkeys((*(known if asked is None else asked), *named))
        reasons = [(name, self._why_empty(name, known, unit, group_size)) for name in names]
        return [f"source {name!r} can give nothing: {reason}." for name, reason in reasons if reason]

    def _why_empty(self, name: str, known: Sequence[str], unit: Unit, group_size: int) -> str | None:
        columns = self.index.columns
        left = match_sources(self.index, (name,)) & (~columns["own"] | (columns["iteration"] < self._request.iteration))
        if not left.any():
            similar = nearest(name, known)
            reason = "no row has it" + (f", but rows have {similar!r}" if similar else " yet: import or attach some")
            return None if name in OWN_SOURCES else reason
        rows, sampler = f"its {np.count_nonzero(left):,} rows", f"replay.sampler {self._sampler.title}"
        for rule, allowed in apply_limits(self._eligible, self._request):
            left = left & allowed
            if not left.any():
                return f"{rule if rule == TOO_LONG else f'replay.{rule}'} leaves out the last of {rows}"
        if self._weights.unknown[left].all():
            return f"{sampler} needs {' and '.join(self._sampler.needs)}, unknown of {rows}"
        if not (self._drawable & left).any():
            return f"{sampler} gives none of {rows} a weight; uniform would"
        whole = find_whole_groups(np.flatnonzero(left), columns)
        if unit == "group" and not (whole.sizes == group_size).any():
            return f"replay.unit group takes whole groups of {group_size}, and {rows} make up none"
        own = columns["task"][columns["own"] & (columns["source"] == self.index.codes["source"].get("self"))]
        if unit in SAME_TASK and len(own) and not np.isin(columns["task"][left], own).any():
            return f"replay.unit {unit} takes rows of tasks that the run collects, and none of {rows} is of one so far"
        return None

    def draw(self, picks: Sequence[Pick]) -> list[SelectedRow]:
        """Return the rows that the next draw would take. The sampler must not need measures of the current policy."""
        selection = Selection(self._eligible, replace(self._request, picks=tuple(picks)), self._sampler)
        return [row for pick in picks for row in selection.choose(pick)]


def _count_available(index: EligibleIndex, weights: SamplingWeights, limits: Limits) -> Availability:
    tasks = index.codes["task"].names
    weighty = weights.weights > 0.0
    there = np.flatnonzero(weighty)
    whole = find_whole_groups(np.flatnonzero(weights.mask), index.columns)
    # Groups count if at least one member has a weight.
    first = whole.first[np.logical_or.reduceat(weighty[whole.rows], whole.starts)] if len(whole) else whole.first
    sizes = index.columns["group_size"]

    def by_task(rows: Positions) -> dict[str, int]:
        counts = _within_caps(index, rows, limits)
        return {tasks[code]: int(counts[code]) for code in np.flatnonzero(counts).tolist()}

    by_source = {name: by_task(rows) for name, rows in _by_source(index, there)}
    groups = Counter((name, size) for name, rows in _by_source(index, first) for size in sizes[rows].tolist())
    all_tasks = by_task(there)
    return Availability(
        rows=sum(all_tasks.values()),
        by_source={name: sum(counts.values()) for name, counts in by_source.items()},
        by_task=all_tasks,
        by_source_task={(name, task): n for name, counts in by_source.items() for task, n in counts.items()},
        groups=dict(Counter(sizes[first].tolist())),
        by_source_groups=dict(groups),
        unknown_priority=int(np.count_nonzero(weights.mask & weights.unknown)),
        incomparable=_incomparable(index, limits),
    )


def _by_source(index: EligibleIndex, rows: Positions) -> list[tuple[str, Positions]]:
    """Return the rows of each source."""
    codes = index.columns["source"][rows]
    return [(index.codes["source"].names[code], rows[codes == code]) for code in np.unique(codes).tolist()]


def _within_caps(index: EligibleIndex, rows: Positions, limits: Limits) -> npt.NDArray[np.int64]:
    """Count how many of the rows one draw could take under the caps, by task code."""
    counts: npt.NDArray[np.int64]
    if limits.per_group is None:
        counts = np.bincount(index.columns["task"][rows])
    else:
        _, first, members = np.unique(index.columns["group"][rows], return_index=True, return_counts=True)
        within = np.minimum(members, limits.per_group)
        counts = np.bincount(index.columns["task"][rows[first]], weights=within).astype(np.int64)
    return counts if limits.per_task is None else np.minimum(counts, limits.per_task)


def _incomparable(index: EligibleIndex, limits: Limits) -> dict[str, int]:
    found = index.mismatches() & ~difference_bits(limits.allow_mismatch)
    counts = {name: int(np.count_nonzero(found & difference_bits((name,)))) for name in DIFFERENCES}
    if limits.max_tokens is not None:
        counts[TOO_LONG] = int(np.count_nonzero(index.columns["longest_segment"] > limits.max_tokens))
    return {name: count for name, count in counts.items() if count}
