"""One run's draws: what is there, what is chosen, what is taken out and reserved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.mixing.request import DrawRequest, Pick
from replay.records import REPLAY, BatchRow, Trajectory
from replay.sampling.samplers import RankedSampler, Sampler
from replay.sampling.selection import SelectedRow, Selection
from replay.sampling.trial_draw import TrialDraw
from replay.sampling.weights import EligibleRows
from replay.storage.draws import release, reserve
from replay.storage.read import load, quarantine
from replay.storage.validate import checked

_log = logging.getLogger(__name__)

Measure = Callable[[Sequence[Trajectory]], Sequence[float]]
"""Mean entropies of the policy that is about to learn, nats per action token, one per trajectory."""


@dataclass(frozen=True)
class Candidates:
    """What a ranked sampler chooses from once it is measured: ids and scores, pick by pick."""

    ids: list[list[str]]
    scores: Mapping[str, float]
    corrupt: Mapping[str, str]


class RunDraws:
    """What one run draws from, kept between its draws. `others`: runs that rows are asked of; sources do no harm."""

    def __init__(self, run: str, others: Collection[str] = ()) -> None:
        self.run, self.others = run, others
        self._eligible = EligibleRows(run, others)

    def prepare(self, connection: sa.Connection, request: DrawRequest, sampler: Sampler) -> None:
        """All that a draw does before it chooses, so that little is left for when writers have to wait for it."""
        self._eligible.refresh(connection, request)
        for pick in request.picks:
            self._eligible.weigh(request, sampler, pick.source)

    def trial(self, connection: sa.Connection, request: DrawRequest, sampler: Sampler) -> TrialDraw:
        """The moment before a draw of `request`, whose picks play no part yet."""
        self._eligible.refresh(connection, request)
        return TrialDraw(self._eligible, request, sampler)

    def draw(
        self, connection: sa.Connection, request: DrawRequest, sampler: Sampler, candidates: Candidates | None = None
    ) -> list[BatchRow]:
        """In place of what was reserved for the request's slots before."""
        checked([request], "draw of iteration", "iteration")
        slots = range(request.first_slot, request.first_slot + request.count)
        release(connection, request.run, request.iteration, slots, stream=REPLAY)
        self._eligible.refresh(connection, request)
        selection = Selection(self._eligible, request, sampler)
        if candidates is not None:
            _quarantined(connection, candidates.corrupt)
        chosen = [
            self._best(selection, pick, candidates, at) if candidates else selection.choose(pick)
            for at, pick in enumerate(request.picks)
        ]
        loaded = self._load(connection, [row for rows in chosen for row in rows])
        drawn: list[tuple[SelectedRow, Trajectory]] = []
        for pick, rows in zip(request.picks, chosen, strict=True):
            drawn += self._replaced(connection, selection, pick, rows, loaded)
        largest = max((row.correction for row, _ in drawn), default=1.0)
        records = [
            replace(request.draw_of(trajectory, slot, REPLAY, row.probability), weight=row.correction / largest)
            for slot, (row, trajectory) in enumerate(drawn, start=request.first_slot)
        ]
        reserve(connection, records)
        return [
            BatchRow(row, record, advantage=row.record.advantage, reward=row.record.reward, weight=record.weight)
            for record, (_, row) in zip(records, drawn, strict=True)
        ]

    def measured(
        self, connection: sa.Connection, request: DrawRequest, sampler: RankedSampler
    ) -> tuple[list[list[str]], dict[str, Trajectory], dict[str, str]]:
        """The candidates of each pick by id, those that could be read, and why others could not."""
        self._eligible.refresh(connection, request)
        selection, names = Selection(self._eligible, request, sampler), self._eligible.index.ids
        ids = [[names[at] for at in selection.candidates(pick, sampler.pool).tolist()] for pick in request.picks]
        together = list(dict.fromkeys(id for each in ids for id in each))
        loaded = load(connection, together, with_messages=False)
        return ids, loaded.whole, loaded.corrupt

    def _best(self, selection: Selection, pick: Pick, candidates: Candidates, at: int) -> list[SelectedRow]:
        """The best of candidates measured before: some may have gone since."""
        found = [(self._eligible.index.position(id), candidates.scores.get(id, np.nan)) for id in candidates.ids[at]]
        there = [(position, score) for position, score in found if position is not None]
        positions: npt.NDArray[np.intp] = np.array([position for position, _ in there], np.intp)
        return selection.best(positions, np.array([score for _, score in there]), pick)

    def _load(self, connection: sa.Connection, rows: Sequence[SelectedRow]) -> dict[int, Trajectory]:
        """Those that can be read, by position. Corrupt ones are quarantined."""
        ids = {self._eligible.index.ids[row.position]: row.position for row in rows}
        loaded = load(connection, list(ids), with_messages=False)
        _quarantined(connection, loaded.corrupt)
        return {ids[id]: trajectory for id, trajectory in loaded.whole.items()}

    def _replaced(
        self,
        connection: sa.Connection,
        selection: Selection,
        pick: Pick,
        rows: list[SelectedRow],
        loaded: dict[int, Trajectory],
    ) -> list[tuple[SelectedRow, Trajectory]]:
        """The rows of a pick with others in place of those that can't be read; a group that lacks one goes whole."""
        kept: list[tuple[SelectedRow, Trajectory]] = []
        groups = self._eligible.index.columns["group"]
        while rows:
            broken = {int(groups[row.position]) for row in rows if row.position not in loaded}
            good = [row for row in rows if row.position in loaded]
            if pick.unit == "group":
                good = [row for row in good if int(groups[row.position]) not in broken]
            kept += [(row, loaded[row.position]) for row in good]
            if len(good) == len(rows):
                break
            selection.release({row.position for row in rows} - {row.position for row in good})
            rows = selection.choose(replace(pick, count=pick.count - len(kept)))
            loaded = self._load(connection, rows)
        return kept


def _quarantined(connection: sa.Connection, corrupt: Mapping[str, str]) -> None:
    quarantine(connection, corrupt)
    for id, reason in corrupt.items():
        _log.warning("trajectory %s quarantined: %s", id, reason)
