"""One run's draws: what is there, what is chosen, what is taken out and reserved; and the next one, tried out."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from context.wording import nearest
from replay.errors import ReplayError
from replay.mixing.mix_settings import SAME_TASK, Unit
from replay.mixing.request import Availability, DrawRequest, Limits, Pick
from replay.records import OWN_SOURCES, REPLAY, BatchRow, Trajectory
from replay.sampling.compatibility import DIFFERENCES, bits
from replay.sampling.index import EligibleIndex
from replay.sampling.samplers import RankedSampler, Sampler
from replay.sampling.selection import Positions, SelectedRow, Selection, whole_groups
from replay.sampling.weights import TOO_LONG, EligibleRows, SamplingWeights, of_source, refuse_incomparable, rules
from replay.storage.draws import release, reserve
from replay.storage.format.rows import RUN_COLUMNS, run_of
from replay.storage.format.schema import runs
from replay.storage.read import Loaded, load, quarantine
from replay.storage.staleness import Mask
from replay.storage.validate import checked

_log = logging.getLogger(__name__)
_RUN_ID = re.compile("[0-9a-f]{32}")

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
        self._vocab_size = 1 << 31

    def _refresh(self, connection: sa.Connection, request: DrawRequest) -> None:
        """Everything that has changed in the database since."""
        is_new = self._eligible.index.is_new
        self._eligible.refresh(connection, request)
        if is_new:
            self._refuse_missing(connection)
            for row in connection.execute(sa.select(*RUN_COLUMNS).where(runs.c.id == self.run)):
                self._vocab_size = run_of(row).vocab_size or self._vocab_size

    def prepare(self, connection: sa.Connection, request: DrawRequest, sampler: Sampler) -> None:
        """All that a draw does before it chooses, so that little is left for when writers have to wait for it."""
        self._refresh(connection, request)
        for pick in request.picks:
            self._eligible.weigh(request, sampler, pick.source)

    def trial(self, connection: sa.Connection, request: DrawRequest, sampler: Sampler) -> TrialDraw:
        """The moment before a draw of `request`, whose picks play no part yet."""
        self._refresh(connection, request)
        return TrialDraw(self._eligible, request, sampler)

    def draw(
        self, connection: sa.Connection, request: DrawRequest, sampler: Sampler, candidates: Candidates | None = None
    ) -> list[BatchRow]:
        """In place of what was reserved for the request's slots before."""
        checked([request], "draw of iteration", "iteration")
        slots = range(request.first_slot, request.first_slot + request.count)
        release(connection, request.run, request.iteration, slots, stream=REPLAY)
        self._refresh(connection, request)
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
        return [BatchRow.drawn(row, record) for record, (_, row) in zip(records, drawn, strict=True)]

    def measured(
        self, connection: sa.Connection, request: DrawRequest, sampler: RankedSampler
    ) -> tuple[list[list[str]], dict[str, Trajectory], dict[str, str]]:
        """The candidates of each pick by id, those that could be read, and why others could not."""
        self._refresh(connection, request)
        selection, names = Selection(self._eligible, request, sampler), self._eligible.index.ids
        ids = [[names[at] for at in selection.candidates(pick, sampler.pool).tolist()] for pick in request.picks]
        together = list(dict.fromkeys(id for each in ids for id in each))
        loaded = self._readable(connection, together)
        return ids, loaded.whole, loaded.corrupt

    def _refuse_missing(self, connection: sa.Connection) -> None:
        """A run that is asked for must be there. What has no rows yet may be a source that is still to be imported."""
        names = [name for name in sorted(self.others) if self._eligible.index.codes["source"].get(name) < 0]
        query = sa.select(runs.c.id, runs.c.name).where(runs.c.id.in_(names) | runs.c.name.in_(names))
        found = {row.id: row.name for row in connection.execute(query)}
        for name in names:
            same = sorted(id for id, title in found.items() if title == name)
            if name not in found and (same or _RUN_ID.fullmatch(name)):
                known = f"{name} is the name of {' and '.join(same)}" if same else "Leave it out, or import its rows"
                raise ReplayError(
                    f"replay.sources must name other runs by the id they have in this database, got {name!r}. {known}."
                )

    def _best(self, selection: Selection, pick: Pick, candidates: Candidates, at: int) -> list[SelectedRow]:
        """The best of candidates measured before: some may have gone since."""
        found = [(self._eligible.index.position(id), candidates.scores.get(id, np.nan)) for id in candidates.ids[at]]
        there = [(position, score) for position, score in found if position is not None]
        positions: npt.NDArray[np.intp] = np.array([position for position, _ in there], np.intp)
        return selection.best(positions, np.array([score for _, score in there]), pick)

    def _readable(self, connection: sa.Connection, ids: Sequence[str]) -> Loaded:
        """A token beyond the run's vocabulary would end the step that trains it."""
        loaded = load(connection, ids, with_messages=False)
        for id, row in [*loaded.whole.items()]:
            most = max(int(part.tokens.token_ids.max()) for part in row.segments if len(part.tokens))
            if most >= self._vocab_size:
                loaded.corrupt[id] = f"token {most} beyond the {self._vocab_size} of the vocabulary of run {self.run}"
                del loaded.whole[id]
        return loaded

    def _load(self, connection: sa.Connection, rows: Sequence[SelectedRow]) -> dict[int, Trajectory]:
        """Those that can be read, by position. Corrupt ones are quarantined."""
        ids = {self._eligible.index.ids[row.position]: row.position for row in rows}
        loaded = self._readable(connection, list(ids))
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


class TrialDraw:
    """What can be asked of the moment before a draw, until the buffer is refreshed; a read-only database will do."""

    def __init__(self, eligible: EligibleRows, request: DrawRequest, sampler: Sampler) -> None:
        self.index = eligible.index
        self._eligible = eligible
        self._request = request
        self._sampler = sampler
        self._weights = eligible.weigh(request, sampler, None)

    @property
    def drawable(self) -> Mask:
        """[N]: rows that the limits allow and the sampler gives a weight."""
        return self._weights.weights > 0.0

    def available(self) -> Availability:
        """Raises ReplayError for a source that is asked for by name and can't be compared with the run's own rows."""
        refuse_incomparable(self.index, self._request)
        return _count_available(self.index, self._weights, self._request.limits)

    def left(self) -> list[tuple[str, int]]:
        """How many rows are left once a rule has left some out, rule after rule; at first, every eligible one is.

        Rules are keys of `replay`, `context.max_tokens`; iteration: rows of later ones; sampler: those it gives no
        weight.
        """
        kept = np.ones(len(self.index), np.bool_)
        found = [("eligible", len(kept))]
        for name, allowed in rules(self._eligible, self._request):
            kept &= allowed
            found.append((name, int(np.count_nonzero(kept))))
        return [*found, ("sampler", int(np.count_nonzero(self.drawable)))]

    def empty_sources(self, unit: Unit, group_size: int, named: Iterable[str] = ()) -> list[str]:
        """A sentence for each source that can give nothing: those of `replay.sources`, of any row where it is empty,
        and those `named` besides. What the run collects itself may still be to come.
        """
        codes = self.index.codes["source"].names
        known = sorted({codes[code] for code in np.unique(self.index.columns["source"]).tolist()})
        asked = self._request.limits.sources
        names = dict.fromkeys((*(known if asked is None else asked), *named))
        reasons = [(name, self._why_empty(name, known, unit, group_size)) for name in names]
        return [f"source {name!r} can give nothing: {reason}." for name, reason in reasons if reason]

    def _why_empty(self, name: str, known: Sequence[str], unit: Unit, group_size: int) -> str | None:
        columns = self.index.columns
        left = of_source(self.index, (name,)) & (~columns["own"] | (columns["iteration"] < self._request.iteration))
        if not left.any():
            similar = nearest(name, known)
            reason = "no row has it" + (f", but rows have {similar!r}" if similar else " yet: import or attach some")
            return None if name in OWN_SOURCES else reason
        rows, sampler = f"its {np.count_nonzero(left):,} rows", f"replay.sampler {self._sampler.title}"
        for rule, allowed in rules(self._eligible, self._request):
            left = left & allowed
            if not left.any():
                return f"{rule if rule == TOO_LONG else f'replay.{rule}'} leaves out the last of {rows}"
        if self._weights.unknown[left].all():
            return f"{sampler} needs {' and '.join(self._sampler.needs)}, unknown of {rows}"
        if not (self.drawable & left).any():
            return f"{sampler} gives none of {rows} a weight; uniform would"
        whole = whole_groups(np.flatnonzero(left), columns)
        if unit == "group" and not (whole.sizes == group_size).any():
            return f"replay.unit group takes whole groups of {group_size}, and {rows} make up none"
        own = columns["task"][columns["own"] & (columns["source"] == self.index.codes["source"].get("self"))]
        if unit in SAME_TASK and len(own) and not np.isin(columns["task"][left], own).any():
            return f"replay.unit {unit} takes rows of tasks that the run collects, and none of {rows} is of one so far"
        return None

    def draw(self, picks: Sequence[Pick]) -> list[SelectedRow]:
        """What the next draw would take. Not for a sampler that asks the current policy: there is none here."""
        selection = Selection(self._eligible, replace(self._request, picks=tuple(picks)), self._sampler)
        return [row for pick in picks for row in selection.choose(pick)]


def _count_available(index: EligibleIndex, weights: SamplingWeights, limits: Limits) -> Availability:
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
    counts = {name: int(np.count_nonzero(found & bits((name,)))) for name in DIFFERENCES}
    if limits.max_tokens is not None:
        counts[TOO_LONG] = int(np.count_nonzero(index.columns["longest_segment"] > limits.max_tokens))
    return {name: count for name, count in counts.items() if count}
