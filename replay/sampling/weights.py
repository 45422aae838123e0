"""What every row weighs for one sampler under the limits, and what rests by use, cooldown or as its task is solved."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.errors import ReplayError
from replay.mixing.request import DrawRequest
from replay.records import HINDSIGHT, ORPHANED, REPLAY
from replay.sampling.base_sampler import Rows, Sampler
from replay.sampling.compatibility import bits, names_of
from replay.sampling.eligible_index import EligibleIndex
from replay.storage.counters import is_live
from replay.storage.format.column_types import restored_column
from replay.storage.format.rows import RUN_COLUMNS, run_of
from replay.storage.format.schema import draws, groups, runs, trajectories
from replay.storage.staleness import Mask, may_be_replayed
from replay.storage.statements import execute

Weights = npt.NDArray[np.float64]
TOO_LONG = "context.max_tokens"
"""The one limit that is no key of `replay`."""
_RUN_ID = re.compile("[0-9a-f]{32}")
_TRAJECTORY = sa.type_coerce(draws.c.trajectory, sa.Text)
_RESERVED = sa.select(_TRAJECTORY).where(is_live(), draws.c.stream == REPLAY)
_LATEST = sa.select(_TRAJECTORY).where(
    draws.c.run == sa.bindparam("run"), draws.c.iteration >= sa.bindparam("since"), draws.c.stream == REPLAY
)


def _by_row(index: EligibleIndex, counts: Mapping[str, int]) -> npt.NDArray[np.int64]:
    found = np.zeros(len(index), np.int64)
    for id, count in counts.items():
        if (position := index.position(id)) is not None:
            found[position] = count
    return found


def _texts(found: sa.CursorResult[Any]) -> Sequence[str]:
    return restored_column(draws.c.trajectory, found.scalars().all())


# Attempts of iterations that were undone say nothing. Of two groups of one iteration the worse one counts: the last.
_UNDONE = sa.exists().where(trajectories.c.group == groups.c.id, trajectories.c.state == ORPHANED)
_NEWEST_RATES = (
    sa.select(groups.c.task, groups.c.success_rate)
    .where(groups.c.run == sa.bindparam("run"), ~_UNDONE)
    .order_by(groups.c.iteration, groups.c.success_rate.desc())
)


@dataclass(frozen=True)
class SamplingWeights:
    """What rows weigh for one sampler at one moment, under one set of limits."""

    mask: Mask
    """[N]: what the limits allow, whatever it weighs."""
    weights: Weights
    """[N]: 0 where the limits forbid the row."""
    unknown: Mask
    """[N]: allowed rows of which the sampler does not know what they weigh."""


class EligibleRows:
    """What one run knows of the rows it may draw, and what they weigh."""

    def __init__(self, run: str, others: Collection[str]) -> None:
        self.index = EligibleIndex(run, others)
        self.vocab_size = 1 << 31
        """The run's; the largest there can be where it says none."""
        self._others = others
        self.reserved = Counter[str]()
        """Draws of updates still to come, of all runs, by row; asked under `max_uses` only."""
        self.resting = frozenset[str]()
        """Rows that the run has drawn in the iterations of its cooldown."""
        self.success_by_task: Weights = np.zeros(0)
        """Success of the run's newest group of each task by the index's codes, whatever became of its members; NaN:
        never tried. Asked under `retire_solved` only."""
        self.changes = 0
        """Grows whenever a refresh finds something new."""
        self._weights: dict[str | None, SamplingWeights] = {}
        """By the source that a pick asks for, as they were weighed at one moment for one sampler and set of limits."""
        self._weighed: tuple[object, ...] = ()

    def refresh(self, connection: sa.Connection, request: DrawRequest) -> None:
        """Everything that has changed in the database since, as far as the request asks for it."""
        limits, is_new = request.limits, self.index.is_new
        before = self.reserved, self.resting, self.success_by_task.tobytes()
        changed = self.index.refresh(connection)
        if is_new:
            self._refuse_missing(connection)
            for row in connection.execute(sa.select(*RUN_COLUMNS).where(runs.c.id == self.index.run)):
                self.vocab_size = run_of(row).vocab_size or self.vocab_size
        if limits.max_uses is not None:
            self.reserved = Counter(_texts(execute(connection, _RESERVED)))
        if limits.cooldown > 0:
            since = request.iteration - limits.cooldown
            self.resting = frozenset(_texts(execute(connection, _LATEST, run=request.run, since=since)))
        if limits.retire_solved is not None:
            newest = dict(map(tuple, connection.execute(_NEWEST_RATES, {"run": request.run})))
            rates = [newest.get(name, np.nan) for name in self.index.codes["task"].names]
            self.success_by_task = np.array(rates, np.float64)
        self.changes += changed or before != (self.reserved, self.resting, self.success_by_task.tobytes())

    def weigh_for_picks(self, request: DrawRequest, sampler: Sampler) -> dict[str | None, SamplingWeights]:
        """The weights of all rows, by the sources that the request's picks ask for."""
        self.refuse_incomparable(request)
        return {pick.source: self.weigh(request, sampler, pick.source) for pick in request.picks}

    def weigh(self, request: DrawRequest, sampler: Sampler, source: str | None) -> SamplingWeights:
        """The weights of all rows for a pick of `source`, None: of every source; kept until anything changes."""
        # Caps hold within one draw; they change no row's weight.
        limits = request.limits.model_copy(update={"per_task": None, "per_group": None})
        if self._weighed != (asked := (request.iteration, request.policy_version, self.changes, sampler, limits)):
            self._weighed, self._weights = asked, {}
        if source not in self._weights:
            mask: Mask = np.logical_and.reduce([kept for _, kept in rules(self, request)])
            if source is not None:
                mask &= of_source(self.index, (source,))
            there = np.flatnonzero(mask)
            weights, unknown = np.zeros(len(self.index)), np.zeros(len(self.index), np.bool_)
            weights[there], unknown[there] = sampler.weigh(Rows(self.index.columns, there, request))
            self._weights[source] = SamplingWeights(mask, weights, unknown)
        return self._weights[source]

    def refuse_incomparable(self, request: DrawRequest) -> None:
        """Raises ReplayError for a source that is named and has no row to give. `self`, the run, will have some."""
        for source in sorted(request.named - {"self"}):
            found = self.index.mismatches()[of_source(self.index, (source,))] & ~bits(request.limits.allow_mismatch)
            if len(found) and found.all():
                names = ", ".join(names_of(int(np.bitwise_or.reduce(found))))
                raise ReplayError(
                    f"source {source!r} must hold rows that can be compared with those of run {request.run}, got rows "
                    f"of another {names}. Leave the source out, or name what may differ in "
                    f"replay.allow_mismatch: [{names}]."
                )

    def _refuse_missing(self, connection: sa.Connection) -> None:
        """A run that is asked for must be there. What has no rows yet may be a source that is still to be imported."""
        names = [name for name in sorted(self._others) if self.index.codes["source"].get(name) < 0]
        query = sa.select(runs.c.id, runs.c.name).where(runs.c.id.in_(names) | runs.c.name.in_(names))
        found = {row.id: row.name for row in connection.execute(query)}
        for name in names:
            same = sorted(id for id, title in found.items() if title == name)
            if name not in found and (same or _RUN_ID.fullmatch(name)):
                known = f"{name} is the name of {' and '.join(same)}" if same else "Leave it out, or import its rows"
                raise ReplayError(
                    f"replay.sources must name other runs by the id they have in this database, got {name!r}. {known}."
                )


def rules(eligible: EligibleRows, request: DrawRequest) -> Iterator[tuple[str, Mask]]:
    """Every limit there is, by its name in the configuration, with the rows that it lets a draw take."""
    index, limits, iteration = eligible.index, request.limits, request.iteration
    columns = index.columns
    own = columns["own"]
    yield "allow_mismatch", (index.mismatches() & ~bits(limits.allow_mismatch)) == 0
    yield TOO_LONG, columns["longest_segment"] <= (np.inf if limits.max_tokens is None else limits.max_tokens)
    yield "iteration", ~own | (columns["iteration"] < iteration)
    if limits.successful_only:
        yield "successful_only", columns["success"]
    if limits.sources is not None:
        yield "sources", of_source(index, limits.sources)
    yield from may_be_replayed(limits, own, request.policy_version - columns["policy_version"])
    if limits.hindsight_window is not None:
        relabelled = own & (columns["source"] == index.codes["source"].get(HINDSIGHT))
        yield "hindsight.window", ~relabelled | (iteration - columns["iteration"] <= limits.hindsight_window)
    if limits.retire_solved is not None:
        yield "retire_solved", ~(eligible.success_by_task >= limits.retire_solved)[columns["task"]]
    if limits.max_uses is not None:
        yield "max_uses", columns["uses"] + _by_row(index, eligible.reserved) < limits.max_uses
    if limits.cooldown > 0:
        yield "cooldown", _by_row(index, dict.fromkeys(eligible.resting, 1)) == 0


def of_source(index: EligibleIndex, names: tuple[str, ...], rows: slice | npt.NDArray[np.intp] = slice(None)) -> Mask:
    """Rows whose source, or whose run if it is another one, has one of the names; `self` is the drawing run alone."""
    columns, own = index.columns, index.codes["source"].get("self")
    source = columns["source"][rows]
    found: Mask = np.isin(source, [index.codes["source"].get(name) for name in names])
    found &= columns["own"][rows] | (source != own)
    other_runs = [index.codes["run"].get(name) for name in names if name != index.run]
    return found | np.isin(columns["run"][rows], other_runs)
