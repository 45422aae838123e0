"""The weights of rows: limits exclude rows, and the sampler weighs the others. Weights are kept until rows change."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.errors import ReplayError
from replay.mixing.request import DrawRequest
from replay.records import HINDSIGHT, REPLAY
from replay.sampling.base_sampler import Rows, Sampler
from replay.sampling.compatibility import difference_bits, difference_names
from replay.sampling.eligible_index import EligibleIndex
from replay.storage.counters import is_live
from replay.storage.format.rows import RUN_COLUMNS, run_of
from replay.storage.format.schema import draws, runs

Mask = npt.NDArray[np.bool_]
Weights = npt.NDArray[np.float64]
TOO_LONG = "context.max_tokens"
"""The only limit that is not a key of `replay`."""


def _by_row(index: EligibleIndex, counts: Mapping[str, int]) -> npt.NDArray[np.int64]:
    found = np.zeros(len(index), np.int64)
    for id, count in counts.items():
        if (position := index.position(id)) is not None:
            found[position] = count
    return found


@dataclass(frozen=True)
class SamplingWeights:
    """The weights of all rows for one sampler and one set of limits."""

    mask: Mask
    """[N]: the rows that the limits allow, whatever they weigh."""
    weights: Weights
    """[N]: 0 for rows that the limits exclude."""
    unknown: Mask
    """[N]: allowed rows whose weight the sampler can't know."""


class EligibleRows:
    """The rows that one run may draw, with everything that the limits and the weights need to know about them."""

    def __init__(self, run: str) -> None:
        self.index = EligibleIndex(run)
        self.vocab_size = 1 << 31
        """The run's vocabulary size; the largest possible one if the run does not state it."""
        self.reserved = Counter[str]()
        """Reserved draws of all runs, by row. Read only under `max_uses`."""
        self.changes = 0
        """A counter that grows whenever a refresh finds something new."""
        self._weights: dict[str | None, SamplingWeights] = {}
        """Weights by the source of a pick, valid for `_weighed`."""
        self._weighed: tuple[object, ...] = ()

    def refresh(self, connection: sa.Connection, request: DrawRequest) -> None:
        """Read what changed in the database, as far as the limits of the request need it."""
        limits, is_new = request.limits, self.index.is_new
        before = self.reserved
        changed = self.index.refresh(connection)
        if is_new:
            for row in connection.execute(sa.select(*RUN_COLUMNS).where(runs.c.id == self.index.run)):
                self.vocab_size = run_of(row).vocab_size or self.vocab_size
        if limits.max_uses is not None:
            replayed = sa.select(draws.c.trajectory).where(draws.c.stream == REPLAY, is_live())
            self.reserved = Counter(connection.scalars(replayed))
        self.changes += changed or before != self.reserved

    def weigh_for_picks(self, request: DrawRequest, sampler: Sampler) -> dict[str | None, SamplingWeights]:
        """Weigh all rows for each source that the request's picks name."""
        self.refuse_incomparable(request)
        return {pick.source: self.weigh(request, sampler, pick.source) for pick in request.picks}

    def weigh(self, request: DrawRequest, sampler: Sampler, source: str | None) -> SamplingWeights:
        """Weigh all rows for a pick of `source`; None: any source. The result is kept until something changes."""
        # Caps act within one draw and change no weight.
        limits = request.limits.model_copy(update={"per_task": None, "per_group": None})
        if self._weighed != (asked := (request.iteration, request.policy_version, self.changes, sampler, limits)):
            self._weighed, self._weights = asked, {}
        if source not in self._weights:
            mask: Mask = np.logical_and.reduce([kept for _, kept in apply_limits(self, request)])
            if source is not None:
                mask &= match_sources(self.index, (source,))
            there = np.flatnonzero(mask)
            weights, unknown = np.zeros(len(self.index)), np.zeros(len(self.index), np.bool_)
            weights[there], unknown[there] = sampler.weigh(Rows(self.index.columns, there, request))
            self._weights[source] = SamplingWeights(mask, weights, unknown)
        return self._weights[source]

    def refuse_incomparable(self, request: DrawRequest) -> None:
        """Raise ReplayError for a named source none of whose rows can be compared with the run's. `self` is exempt."""
        for source in sorted(request.named_sources - {"self"}):
            allowed = difference_bits(request.limits.allow_mismatch)
            found = self.index.mismatches()[match_sources(self.index, (source,))] & ~allowed
            if len(found) and found.all():
                names = ", ".join(difference_names(int(np.bitwise_or.reduce(found))))
                raise ReplayError(
                    f"source {source!r} must hold rows that can be compared with those of run {request.run}, got rows "
                    f"of another {names}. Name what may differ in replay.allow_mismatch: [{names}], or begin a new "
                    "run without this source."
                )


def apply_limits(eligible: EligibleRows, request: DrawRequest) -> Iterator[tuple[str, Mask]]:
    """Yield each limit's name in the configuration with a mask of the rows that the limit allows."""
    index, limits, iteration = eligible.index, request.limits, request.iteration
    columns = index.columns
    own = columns["own"]
    yield "allow_mismatch", (index.mismatches() & ~difference_bits(limits.allow_mismatch)) == 0
    yield TOO_LONG, columns["longest_segment"] <= (np.inf if limits.max_tokens is None else limits.max_tokens)
    yield "iteration", ~own | (columns["iteration"] < iteration)
    if limits.successful_only:
        yield "successful_only", columns["success"]
    if limits.sources is not None:
        yield "sources", match_sources(index, limits.sources)
    if limits.max_staleness is not None:  # unknown of rows of other runs, which are drawn
        yield "max_staleness", ~own | (request.policy_version - columns["policy_version"] <= limits.max_staleness)
    if limits.hindsight_window is not None:
        relabelled = own & (columns["source"] == index.codes["source"].get(HINDSIGHT))
        yield "hindsight.window", ~relabelled | (iteration - columns["iteration"] <= limits.hindsight_window)
    if limits.max_uses is not None:
        yield "max_uses", columns["uses"] + _by_row(index, eligible.reserved) < limits.max_uses


def match_sources(index: EligibleIndex, names: tuple[str, ...]) -> Mask:
    """Return a mask of the rows whose source is named."""
    return np.isin(index.columns["source"], [index.codes["source"].get(name) for name in names])
