"""A run's next draw, tried out: what it could take, what its limits leave out, and rows it might take.

Nothing is reserved and nothing is written, so a database that is open to be read only will do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replay.mixing.request import Availability, DrawRequest, Pick
from replay.sampling.availability import count_available
from replay.sampling.index import EligibleIndex
from replay.sampling.samplers import DrawClock, Sampler
from replay.sampling.selection import SelectedRow, Selection
from replay.sampling.weights import EligibleRows, SamplingWeights, refuse_incomparable, rules


@dataclass(frozen=True)
class FilterStep:
    """How many rows are left once a rule has left some out."""

    rule: str
    """Key of the configuration's part `replay`; iteration: rows of later ones; sampler: those it gives no weight."""
    rows: int


class TrialDraw:
    """What can be asked of the moment before a draw. It is good until the buffer is refreshed."""

    def __init__(
        self,
        eligible: EligibleRows,
        request: DrawRequest,
        sampler: Sampler,
        weights: Mapping[str | None, SamplingWeights],
    ) -> None:
        self._eligible = eligible
        self._request = request
        self._sampler = sampler
        self._weights = weights
        self._now = DrawClock.of(request)

    @property
    def index(self) -> EligibleIndex:
        return self._eligible.index

    @property
    def drawable(self) -> npt.NDArray[np.bool_]:
        """[N]: rows that the limits allow and the sampler gives a weight."""
        return self._weights[None].tree.weights > 0.0

    def available(self) -> Availability:
        """Raises ReplayError for a source that is asked for by name and can't be compared with the run's own rows."""
        refuse_incomparable(self.index, self._request)
        return count_available(self._weights[None], self._request.limits)

    def left(self) -> list[FilterStep]:
        """Rule after rule, in the order they are asked; the first is every eligible row."""
        kept = np.ones(len(self.index), np.bool_)
        found = [FilterStep("eligible", len(kept))]
        for name, allowed in rules(self._eligible, self._request.limits, self._now, slice(None)):
            kept &= allowed
            found.append(FilterStep(name, int(np.count_nonzero(kept))))
        return [*found, FilterStep("sampler", int(np.count_nonzero(self.drawable)))]

    def draws(self, picks: Sequence[Pick], times: int) -> list[list[SelectedRow]]:
        """What so many draws would take, each as if it were the next; the sampler's random numbers go on between them.

        Not for a sampler that asks the current policy: there is none here.
        """
        selection = Selection(self._weights, self._sampler, self._request.limits, self._now)
        found = []
        for _ in range(times):
            selection.begin_again()
            found.append([row for pick in picks for row in selection.choose(pick)])
        return found
