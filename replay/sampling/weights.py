"""What every row weighs for one sampler under some limits: a sum tree that follows the index."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.errors import ReplayError
from replay.mixing.request import DrawRequest, Limits
from replay.records import HINDSIGHT
from replay.sampling.compatibility import bits, names_of
from replay.sampling.index import EligibleIndex, GrowableArray
from replay.sampling.samplers import DrawClock, Rows, Sampler
from replay.sampling.sum_tree import SumTree
from replay.sampling.usage import SolvedTasks, Uses

Mask = npt.NDArray[np.bool_]


class EligibleRows:
    """What one run knows of the rows it may draw."""

    def __init__(self, run: str, others: Collection[str]) -> None:
        self.index = EligibleIndex(run, others)
        self.uses = Uses()
        self.solved = SolvedTasks(run)
        self.changes = 0
        """Grows whenever a refresh finds something new."""

    def refresh(self, connection: sa.Connection, request: DrawRequest) -> None:
        """Everything that has changed in the database since, as far as the request asks for it."""
        changed = self.index.refresh(connection)
        changed |= self.uses.refresh(connection, request)
        if request.limits.retire_solved is not None:
            changed |= self.solved.refresh(connection, self.index)
        self.changes += changed


def rules(eligible: EligibleRows, limits: Limits, now: DrawClock, rows: slice) -> Iterator[tuple[str, Mask]]:
    """Every limit there is, by its name in the configuration, with the rows that it lets a draw take."""
    index = eligible.index
    columns = {name: column[rows] for name, column in index.columns.items()}
    own = known = columns["own"]
    yield "allow_mismatch", (index.mismatches(rows) & ~bits(limits.allow_mismatch)) == 0
    yield "iteration", ~own | (columns["iteration"] < now.iteration)
    if limits.successful_only:
        yield "successful_only", columns["success"]
    if limits.sources is not None:
        yield "sources", of_source(index, limits.sources, rows)
    if limits.unknown_staleness == "refuse":
        yield "unknown_staleness", known
    if limits.max_staleness is not None:
        yield "max_staleness", ~known | (now.policy_version - columns["policy_version"] <= limits.max_staleness)
    if limits.hindsight_window is not None:
        relabelled = own & (columns["source"] == index.codes["source"].get(HINDSIGHT))
        yield "hindsight.window", ~relabelled | (now.iteration - columns["iteration"] <= limits.hindsight_window)
    if limits.retire_solved is not None:
        yield "retire_solved", ~eligible.solved.solved(limits.retire_solved)[columns["task"]]
    if limits.max_uses is not None:
        yield "max_uses", columns["uses"] + eligible.uses.reserved(index)[rows] < limits.max_uses
    if limits.cooldown > 0:
        yield "cooldown", ~eligible.uses.resting(index)[rows]


def of_source(index: EligibleIndex, names: tuple[str, ...], rows: slice | npt.NDArray[np.intp]) -> Mask:
    """Rows whose source, or whose run if it is another one, has one of the names; `self` is the drawing run alone."""
    columns, own = index.columns, index.codes["source"].get("self")
    source = columns["source"][rows]
    found: Mask = np.isin(source, [index.codes["source"].get(name) for name in names])
    found &= columns["own"][rows] | (source != own)
    runs = [index.codes["run"].get(name) for name in names if name != index.run]
    return found | np.isin(columns["run"][rows], runs)


def refuse_incomparable(index: EligibleIndex, request: DrawRequest) -> None:
    """A source that is asked for by name must have rows to give, or the error says why not.

    `self` is the drawing run too, which will have some.
    """
    limits = request.limits
    for source in sorted(request.named - {"self"}):
        found = index.mismatches(slice(None))[of_source(index, (source,), slice(None))]
        found &= ~bits(limits.allow_mismatch)
        if len(found) and found.all():
            names = names_of(int(np.bitwise_or.reduce(found)))
            raise ReplayError(
                f"source {source!r} must hold rows that can be compared with those of run {request.run}, got rows "
                f"of another {', '.join(names)}. Leave the source out, or name what may differ in "
                f"replay.allow_mismatch: [{', '.join(names)}]."
            )


class SamplingWeights:
    """The weights of one sampler under one set of limits, row by row, up to date with the index."""

    def __init__(self, eligible: EligibleRows, sampler: Sampler, limits: Limits, source: str | None) -> None:
        self._limits = limits
        self._eligible = eligible
        self.index = eligible.index
        self._sampler = sampler
        self._source = source
        self.tree = SumTree()
        """Weight of each row; 0 where the limits forbid it."""
        self._mask = GrowableArray(np.zeros(0, np.bool_))
        self._unknown = GrowableArray(np.zeros(0, np.bool_))
        self._weights = GrowableArray(np.zeros(0))
        self._layout = -1
        self._reference: object = None
        self._settled = 0
        self._followed: tuple[DrawClock, int] | None = None

    @property
    def mask(self) -> Mask:
        """[N]: what the limits allow, whatever it weighs."""
        return self._mask.values

    @property
    def unknown(self) -> Mask:
        """[N]: the sampler does not know what the row weighs; of allowed rows only, if it is not row-wise."""
        return self._unknown.values

    def follow(self, now: DrawClock) -> None:
        """Weights as of this moment; only what has come or changed is weighed, where limits and sampler allow it."""
        if self._followed == (now, self._eligible.changes):
            return
        index, reference = self._eligible.index, self._sampler.reference(now)
        went_back = self._followed is not None and now.iteration < self._followed[0].iteration
        self._followed = now, self._eligible.changes
        if self._layout != index.layout or self._reference != reference or went_back:
            self._settled, self._layout, self._reference = 0, index.layout, reference
            self._weights.cut(0)
            self._unknown.cut(0)
            self.tree = SumTree()
        if not self._limits.is_fixed:
            self._settled = 0
        first, rest = self._settled, slice(self._settled, len(index))
        self._mask.cut(first)
        if first == len(index) and self._sampler.row_wise:
            return
        new: Mask = np.logical_and.reduce([kept for _, kept in rules(self._eligible, self._limits, now, rest)])
        if self._source is not None:
            new &= of_source(index, (self._source,), rest)
        self._mask.extend(new)
        self._weigh(now)
        self._update(first if self._sampler.row_wise else 0)
        later = np.flatnonzero(index.columns["own"][rest] & (index.columns["iteration"][rest] >= now.iteration))
        # Rows of iterations to come are not drawn yet: they are looked at again.
        self._settled = first + int(later[0]) if len(later) else len(index)

    def _weigh(self, now: DrawClock) -> None:
        columns, size = self._eligible.index.columns, len(self._mask)
        if self._sampler.row_wise:
            weights, unknown = self._sampler.weigh(Rows(columns, slice(len(self._weights), size), now))
        else:
            there = np.flatnonzero(self.mask)
            weights, unknown = np.zeros(size), np.zeros(size, np.bool_)
            weights[there], unknown[there] = self._sampler.weigh(Rows(columns, there, now))
            self._weights.cut(0)
            self._unknown.cut(0)
        self._weights.extend(weights)
        self._unknown.extend(unknown)

    def _update(self, first: int) -> None:
        self.tree.extend(len(self._mask))
        wanted = np.where(self.mask[first:], self._weights.values[first:], 0.0)
        differ = np.flatnonzero(wanted != self.tree.weights[first:])
        if 4 * len(differ) > len(self._mask):
            self.tree.fill(np.concatenate([self.tree.weights[:first], wanted]))
        else:
            self.tree.put(differ + first, wanted[differ])
