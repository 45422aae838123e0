"""What every row weighs for one sampler under some limits, and the limits themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.errors import ReplayError
from replay.mixing.request import DrawRequest, Limits
from replay.records import HINDSIGHT
from replay.sampling.compatibility import bits, names_of
from replay.sampling.index import EligibleIndex
from replay.sampling.samplers import DrawClock, Rows, Sampler
from replay.sampling.usage import SolvedTasks, Uses

Mask = npt.NDArray[np.bool_]
Weights = npt.NDArray[np.float64]


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


def rules(eligible: EligibleRows, limits: Limits, now: DrawClock) -> Iterator[tuple[str, Mask]]:
    """Every limit there is, by its name in the configuration, with the rows that it lets a draw take.

    Staleness of replayed rows is bounded here; that of fresh ones in `replay.storage.collecting.fresh_groups`.
    """
    index = eligible.index
    columns = index.columns
    own = known = columns["own"]
    yield "allow_mismatch", (index.mismatches() & ~bits(limits.allow_mismatch)) == 0
    yield "iteration", ~own | (columns["iteration"] < now.iteration)
    if limits.successful_only:
        yield "successful_only", columns["success"]
    if limits.sources is not None:
        yield "sources", of_source(index, limits.sources)
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
        yield "max_uses", columns["uses"] + eligible.uses.reserved(index) < limits.max_uses
    if limits.cooldown > 0:
        yield "cooldown", ~eligible.uses.resting(index)


def of_source(
    index: EligibleIndex,
    names: tuple[str, ...],
    rows: slice | npt.NDArray[np.intp] = slice(None),
) -> Mask:
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
        found = index.mismatches()[of_source(index, (source,))]
        found &= ~bits(limits.allow_mismatch)
        if len(found) and found.all():
            names = names_of(int(np.bitwise_or.reduce(found)))
            raise ReplayError(
                f"source {source!r} must hold rows that can be compared with those of run {request.run}, got rows "
                f"of another {', '.join(names)}. Leave the source out, or name what may differ in "
                f"replay.allow_mismatch: [{', '.join(names)}]."
            )


@dataclass(frozen=True)
class SamplingWeights:
    """What rows weigh for one sampler at one moment, under one set of limits."""

    index: EligibleIndex
    mask: Mask
    """[N]: what the limits allow, whatever it weighs."""
    weights: Weights
    """[N]: 0 where the limits forbid the row."""
    unknown: Mask
    """[N]: allowed rows of which the sampler does not know what they weigh."""


def weigh(
    eligible: EligibleRows, sampler: Sampler, limits: Limits, source: str | None, now: DrawClock
) -> SamplingWeights:
    """Of the rows that a pick of `source` could take; None: of every source."""
    index = eligible.index
    mask: Mask = np.logical_and.reduce([kept for _, kept in rules(eligible, limits, now)])
    if source is not None:
        mask &= of_source(index, (source,))
    there = np.flatnonzero(mask)
    weights, unknown = np.zeros(len(index)), np.zeros(len(index), np.bool_)
    weights[there], unknown[there] = sampler.weigh(Rows(index.columns, there, now))
    return SamplingWeights(index, mask, weights, unknown)
