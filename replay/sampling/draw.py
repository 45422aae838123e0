"""A draw chooses rows for each pick, reads them, and reserves them for slots of the iteration's batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import sqlalchemy as sa

from replay.mixing.request import DrawRequest, Pick
from replay.records import REPLAY, BatchRow, Trajectory
from replay.sampling.base_sampler import Sampler
from replay.sampling.selection import SelectedRow, Selection
from replay.sampling.trial import TrialDraw
from replay.sampling.weights import EligibleRows
from replay.storage.draw_records import release, reserve
from replay.storage.read import load, quarantine

_log = logging.getLogger(__name__)


class RunDraws:
    """The draws of one run. Rows are kept in memory between draws."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._eligible = EligibleRows(run)

    def draw(self, connection: sa.Connection, request: DrawRequest, sampler: Sampler) -> list[BatchRow]:
        """Draw rows for each pick in turn, and reserve them for the request's slots, replacing earlier reservations."""
        release(connection, request.run, request.iteration, request.slots, stream=REPLAY)
        self._eligible.refresh(connection, request)
        selection = Selection(self._eligible, request, sampler)
        chosen = [selection.choose(pick) for pick in request.picks]
        drawn = self._read(connection, selection, request.picks, chosen)
        largest = max((row.correction for row, _ in drawn), default=1.0)
        records = [
            request.record_draw(whole, slot, REPLAY, probability=row.probability, weight=row.correction / largest)
            for slot, (row, whole) in enumerate(drawn, start=request.first_slot)
        ]
        reserve(connection, records)
        return [BatchRow.drawn(whole, record) for record, (_, whole) in zip(records, drawn, strict=True)]

    def prepare(self, connection: sa.Connection, request: DrawRequest, sampler: Sampler) -> None:
        """Refresh and weigh the rows ahead of a draw, so that other writers wait less for the draw itself."""
        self._eligible.refresh(connection, request)
        self._eligible.weigh_for_picks(request, sampler)

    def trial(self, connection: sa.Connection, request: DrawRequest, sampler: Sampler) -> TrialDraw:
        """Return a trial of the next draw. The picks of `request` play no part."""
        self._eligible.refresh(connection, request)
        return TrialDraw(self._eligible, request, sampler)

    def _read(
        self, connection: sa.Connection, selection: Selection, picks: Sequence[Pick], chosen: list[list[SelectedRow]]
    ) -> list[tuple[SelectedRow, Trajectory]]:
        """Read the chosen rows. Unreadable rows are replaced by others; a group with one is replaced as a whole."""
        loaded = self._load_chosen(connection, [row for rows in chosen for row in rows])
        drawn: list[tuple[SelectedRow, Trajectory]] = []
        for pick, rows in zip(picks, chosen, strict=True):
            found, left = loaded, pick.count
            while rows:
                good = self._whole(pick, rows, found)
                drawn += [(row, found[row.position]) for row in good]
                if len(good) == len(rows):
                    break
                left -= len(good)
                selection.release({row.position for row in rows} - {row.position for row in good})
                rows = selection.choose(replace(pick, count=left))
                found = self._load_chosen(connection, rows)
        return drawn

    def _whole(self, pick: Pick, rows: list[SelectedRow], found: Mapping[int, Trajectory]) -> list[SelectedRow]:
        """Return the rows that could be read. A pick of groups keeps only groups of which every row could be read."""
        groups = self._eligible.index.columns["group"]
        broken = {int(groups[row.position]) for row in rows if row.position not in found}
        if pick.unit == "group":
            return [row for row in rows if int(groups[row.position]) not in broken]
        return [row for row in rows if row.position in found]

    def _load_chosen(self, connection: sa.Connection, rows: Sequence[SelectedRow]) -> dict[int, Trajectory]:
        """Return the trajectories that can be read, by position. The others are quarantined.

        A row with a token beyond the run's vocabulary counts as corrupt: it could not be trained.
        """
        positions = {self._eligible.index.ids[row.position]: row.position for row in rows}
        loaded, vocab_size = load(connection, list(positions), with_messages=False), self._eligible.vocab_size
        for id, trajectory in [*loaded.whole.items()]:
            most = max(int(part.tokens.token_ids.max()) for part in trajectory.segments if len(part.tokens))
            if most >= vocab_size:
                loaded.corrupt[id] = f"token {most} beyond the {vocab_size} of the vocabulary of run {self.run}"
                del loaded.whole[id]
        if loaded.corrupt:
            quarantine(connection, loaded.corrupt)
        for id, reason in loaded.corrupt.items():
            _log.warning("trajectory %s quarantined: %s", id, reason)
        return {positions[id]: trajectory for id, trajectory in loaded.whole.items()}
