"""`ReplayStore`: the one object that puts experience into the database and takes it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.errors import ReplayError, SessionForgotten
from replay.mixing.request import Availability, DrawRequest
from replay.records import (
    BatchRow,
    DrawRecord,
    GroupRecord,
    HeldOutEpisode,
    IterationRecord,
    ObservationRecord,
    PolicyRecord,
    RunRecord,
    TaskRecord,
    Trajectory,
)
from replay.sampling.base_sampler import RankedSampler, Sampler
from replay.sampling.draw import Candidates, Measure, RunDraws
from replay.sampling.trial import TrialDraw
from replay.storage import counters, draw_records, read, retention, sessions, tombstones, write
from replay.storage.collecting import fresh_groups, never_drawn
from replay.storage.collecting.participants import Roles
from replay.storage.collecting.tickets import Tickets
from replay.storage.databases import Database, Location, Result, create_database, open_database, retried
from replay.storage.draw_records import ResumeReport
from replay.storage.format.rows import RUN_COLUMNS, run_of
from replay.storage.format.schema import runs
from replay.storage.labels import Labels
from replay.storage.retention import Capacity, Evicted
from replay.storage.sessions import Sessions
from replay.storage.tombstones import Forgotten
from replay.storage.validate import checked
from replay.storage.verify import Verification, verify
from replay.storage.write import AppendReport, Redactor

_PURGED = 2_000


class ReplayStore:
    """Experience at rest. Every method is one transaction: done when it returns, not begun when it raises; where a disk
    or a server fails at the very end it may be done though it raised: DatabaseFailed says so."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.url, self.path = database.url, database.path
        """Where the experience stands, for people, without a password; and the file, where it is one."""
        self.reading, self.size, self.close = database.reading, database.size, database.close
        self.naming_damage = database.naming_damage
        """For who works on with what was read."""
        self._runs: dict[str, RunRecord] = {}
        self._newest: RunDraws | None = None
        """The draws of the run that was asked for last: each holds every row in memory, and they must not pile up."""
        self._lock = Lock()
        self._epochs: dict[str, int] = {}
        """The runs that this store began or resumed: nobody else may have resumed them since when it writes them."""
        self.tickets = Tickets(database, self._write, self._run)
        self.roles = Roles(database)
        self.sessions = Sessions(database, lambda work: self._write(work, *self._epochs))
        self.labels = Labels(self._write)

    @classmethod
    def create(cls, location: Location) -> ReplayStore:
        """Open for writing; the database is made if need be."""
        return cls(create_database(location))

    @classmethod
    def open(cls, location: Location, *, read_only: bool = False) -> ReplayStore:
        """Open what exists; raises DatabaseRefused where there is nothing."""
        return cls(open_database(location, read_only=read_only))

    def add_run(self, run: RunRecord) -> None:
        """Once per run; a known run must have the same authors, and gets this configuration. A store that adds a run
        which nobody has resumed yet is refused when somebody has: see `resume`."""
        if self._write(lambda connection: write.add_run(connection, run)) == 0:
            self._epochs.setdefault(run.id, 0)

    def add_policy(self, policy: PolicyRecord) -> None:
        """One per publish; one published again after a resume takes the place of the lost one."""
        self._write(lambda connection: write.add_policy(connection, policy), policy.run)

    def run(self, id: str | None = None) -> RunRecord:
        """The run of that id, or the only one."""
        wanted = sa.select(*RUN_COLUMNS).where(sa.true() if id is None else runs.c.id == id)
        found = self._database.read(lambda connection: [run_of(row) for row in connection.execute(wanted)])
        if len(found) != 1:
            which = "no id" if id is None else repr(id)
            raise ReplayError(
                f"run must name one run of {self.url}, got {which}, which fits {len(found)}. Give its id."
            )
        return found[0]

    def append(
        self,
        tasks: Sequence[TaskRecord],
        groups: Sequence[GroupRecord],
        trajectories: Sequence[Trajectory],
        *,
        redact: Redactor | None = None,
        ended: Sequence[str] = (),
    ) -> AppendReport:
        """Store whole trajectories with their groups and tasks; one that is there already counts as a duplicate.

        `ended`: ids of sessions that are under way no more. Raises InvalidRecord naming the field, also for another row
        under the same id, and SessionForgotten where a session is not there; then nothing has been stored.
        """
        of_rows = {id: self._run(id) for id in {t.record.run for t in trajectories}}
        compressed = self._database.compresses_text
        prepared = write.prepare(tasks, groups, trajectories, of_rows, redact=redact, compress_text=compressed)
        written = {record.run for record in groups} | of_rows.keys()

        def work(connection: sa.Connection) -> AppendReport:
            report = write.append(connection, prepared)
            if ended and sessions.end(connection, ended) < len(ended) and report.inserted:
                raise SessionForgotten(f"ended must be of sessions that are stored, got {', '.join(ended)}.")
            return report

        return self._write(work, *written)

    def check(
        self,
        tasks: Sequence[TaskRecord],
        groups: Sequence[GroupRecord],
        trajectories: Sequence[Trajectory],
        of_rows: Mapping[str, RunRecord],
    ) -> None:
        """Raises what `append` would raise, and stores nothing. `of_rows` are the rows' runs by id."""
        prepared = write.prepare(tasks, groups, trajectories, of_rows, compress_text=self._database.compresses_text)
        self._database.read(lambda connection: write.missing_rows(connection, prepared))

    def remember(self, records: Sequence[ObservationRecord]) -> None:
        """Keep what deterministic tools answered; what is known already stays as it is. Their tasks are stored."""
        if records:
            self._write(lambda connection: never_drawn.remember(connection, records))

    def remembered(self, environment: str, tasks: Sequence[str]) -> list[ObservationRecord]:
        """What the tools of an environment answered for these tasks."""
        return self._database.read(lambda connection: never_drawn.remembered(connection, environment, tasks))

    def read(self, ids: Sequence[str]) -> list[Trajectory]:
        """Whole trajectories in the order asked; a damaged one is quarantined and raises CorruptTrajectory."""
        loaded = self._database.read(lambda connection: read.load(connection, ids))
        if loaded.corrupt and not self._database.read_only:
            self.quarantine(loaded.corrupt)
        return loaded.in_order(ids)

    def available(self, request: DrawRequest, sampler: Sampler) -> Availability:
        """What a draw could take; `request.picks` play no part."""

        def counted() -> Availability:
            with self._run_draws(request) as run_draws, self._database.reading() as connection:
                return run_draws.trial(connection, request, sampler).available()

        return retried(counted)

    @contextmanager
    def trial_draw(self, request: DrawRequest, sampler: Sampler) -> Iterator[TrialDraw]:
        """The moment before a draw, of which nothing is reserved. Nobody else draws for the run meanwhile."""
        with self._run_draws(request) as run_draws, self._database.reading() as connection:
            yield run_draws.trial(connection, request, sampler)

    def draw(self, request: DrawRequest, sampler: Sampler, *, measure: Measure | None = None) -> list[BatchRow]:
        """Select and reserve, in the order of the picks; fewer than asked if there are not enough. A corrupt row is
        quarantined and another drawn. `measure` is called outside any transaction, for a sampler that chooses by the
        current policy. Raises ReplayError for a source that is named and can't be compared with the run's own rows."""
        checked([request], "draw of iteration", "iteration")
        begun = sampler.state()

        def drawn() -> list[BatchRow]:
            sampler.load_state(begun)
            with self._run_draws(request) as run_draws:
                candidates = self._measured(run_draws, request, sampler, measure)
                if candidates is None:
                    # What is new may be many rows: writers need not wait until they are read and weighed.
                    with self._database.reading() as connection:
                        run_draws.prepare(connection, request, sampler)
                with self._writing(request.run) as connection:
                    return run_draws.draw(connection, request, sampler, candidates)

        return retried(drawn)

    def _measured(
        self, run_draws: RunDraws, request: DrawRequest, sampler: Sampler, measure: Measure | None
    ) -> Candidates | None:
        if not (isinstance(sampler, RankedSampler) and sampler.measured):
            return None
        if measure is None:
            raise ValueError(f"measure must be given for sampler {sampler.title} by the current policy, got None.")
        with self._database.reading() as connection:
            ids, whole, corrupt = run_draws.read_candidates(connection, request, sampler)
        values = measure(list(whole.values())) if whole else []
        scores = {id: sampler.sign * value for id, value in zip(whole, values, strict=True)}
        return Candidates(ids, scores, corrupt)

    @contextmanager
    def _run_draws(self, request: DrawRequest) -> Iterator[RunDraws]:
        """What the run draws from. After an error it is read again: it may have seen what was rolled back."""
        with self._lock:
            if self._newest is None or (self._newest.run, self._newest.others) != (request.run, request.named_sources):
                self._newest = RunDraws(request.run, request.named_sources)
            try:
                yield self._newest
            except BaseException:
                self._newest = None
                raise

    def reserve_fresh(self, records: Sequence[DrawRecord]) -> None:
        """The slots of the iteration's own rows; reserved again, they take the place of those before."""
        self._write(
            lambda connection: draw_records.reserve_given(connection, records), *{record.run for record in records}
        )

    def commit(
        self, iteration: IterationRecord, records: Sequence[DrawRecord], *, sampler_state: Mapping[str, Any]
    ) -> None:
        """What an update did: its draws with their statistics, its iteration and metrics, the sampler after it.
        `records` are exactly the iteration's reserved draws, in any order. Committed again, they count as done."""
        self._write(
            lambda connection: draw_records.commit(connection, iteration, records, sampler_state=sampler_state),
            iteration.run,
        )

    def add_metrics(self, run: str, iteration: int, metrics: Mapping[str, float]) -> None:
        """Measured outside an update, such as an evaluation; a name given again takes the new value."""
        self._write(lambda connection: write.add_metrics(connection, run, iteration, metrics), run)

    def add_scores(self, run: str, version: int, scores: Mapping[tuple[str, int], npt.NDArray[np.float32]]) -> None:
        """Log-probs of stored segments, by (trajectory, position), under policy `version` of `run`, in place of earlier
        ones: [T] float32 nats, NaN where no token was sampled."""
        self._write(lambda connection: write.add_scores(connection, run, version, scores), run)

    def resume(self, run: str, iteration: int) -> ResumeReport:
        """Back to the state the run had after committing `iteration`, whatever a crash left behind. The run is this
        store's from now on: whoever wrote it before is refused with RunReplaced."""
        with self._lock:
            # It has read groups that are undone now.
            self._newest = None

        def work(connection: sa.Connection) -> tuple[int, ResumeReport]:
            epoch = counters.take_over(connection, run)
            retention.restore(connection, run, iteration)
            again = fresh_groups.take_back(connection, run, iteration)
            return epoch, replace(draw_records.resume(connection, run, iteration), fresh_again=again)

        self._epochs[run], report = self._write(work)
        return report

    def refuse_replaced(self, run: str) -> None:
        """Raises RunReplaced where somebody else has resumed the run: for its files, which no transaction guards."""
        if run in self._epochs:
            self._database.read(lambda connection: counters.refuse_replaced(connection, run, self._epochs[run]))

    def evict(self, run: str, iteration: int, *, policy_version: int, capacity: Capacity) -> dict[str, float]:
        """Never draw again what `run` has no room for after `iteration`: metrics of what is kept and what is not. Rows
        are there until `purge`, for a resume from an earlier iteration to take them back."""

        def work(connection: sa.Connection) -> dict[str, float]:
            over = retention.over_capacity(connection, run, iteration, policy_version=policy_version, capacity=capacity)
            evicted = retention.evict(connection, over, iteration=iteration)
            return retention.buffer_metrics(connection, run) | evicted.metrics()

        return self._write(work, run) if capacity else self._database.read(work)

    def purge(self, run: str, iteration: int) -> int:
        """Rows evicted up to `iteration`, which no resume will go back before, go, some at a time; how many."""
        ids = self._database.read(lambda connection: retention.evicted_through(connection, run, iteration))
        for start in range(0, len(ids), _PURGED):
            self._write(partial(tombstones.reclaim, ids=ids[start : start + _PURGED]), run)
        return len(ids)

    def prune(
        self,
        run: str | None = None,
        *,
        rows: sa.ColumnElement[bool] | None = None,
        capacity: Capacity = Capacity(),  # noqa: B008  frozen
        dry_run: bool,
    ) -> Evicted:
        """What a person wants gone is evicted for good at once; or only counted."""

        def work(connection: sa.Connection) -> Evicted:
            over = retention.by_hand(connection, run, rows, capacity)
            return retention.summed(over) if dry_run else retention.prune(connection, over)

        return self._database.read(work) if dry_run else self._database.write(work)

    def compact(self) -> tuple[int, int]:
        """Give the disk back what evicted and forgotten rows took; bytes before and after. Waits for other writers, and
        raises ReplayError where readers or a full disk keep the database from being written again."""
        before = self._database.read(self._database.size)
        self._database.erase(lambda connection: None)
        return before, self._database.read(self._database.size)

    def keep_held_out(self, run: str, episodes: Sequence[HeldOutEpisode], *, evaluations: int) -> None:
        """Episodes of an evaluation, in place of what stood in their places; all but the newest `evaluations` go."""

        def work(connection: sa.Connection) -> None:
            never_drawn.put_episodes(connection, episodes, compressed=self._database.compresses_text)
            never_drawn.keep_newest(connection, run, evaluations)

        self._write(work, run)

    def forget(self, rows: sa.ColumnElement[bool] | None, *, held_out: str | None = None, dry_run: bool) -> Forgotten:
        """Remove content for good, with the database written again without it; or only count it. `rows`: None for no
        row. `held_out`: the run whose held-out episodes and sessions under way go too, or "*" for those of all."""
        asked = sa.false() if rows is None else rows
        if dry_run:
            return self._database.read(lambda connection: tombstones.forget(connection, asked, held_out, dry_run=True))
        return self._database.erase(lambda connection: tombstones.forget(connection, asked, held_out))

    def verify(self, wanted: sa.ColumnElement[bool] | None = None) -> Verification:
        """Read every row, or those of `wanted`: see `replay.storage.verify`."""
        return verify(self._database, sa.true() if wanted is None else wanted)

    def quarantine(self, reasons: Mapping[str, str]) -> None:
        """Rows found to be corrupt, with the reason by id: never drawn again."""
        self._write(lambda connection: read.quarantine(connection, reasons))

    @contextmanager
    def _writing(self, *runs: str) -> Iterator[sa.Connection]:
        """The transaction of everything that is written of these runs; raises RunReplaced where this store began or
        resumed one of them and somebody else has resumed it since."""
        with self._database.writing() as connection:
            for run in self._epochs.keys() & set(runs):
                counters.refuse_replaced(connection, run, self._epochs[run])
            yield connection

    def _write(self, work: Callable[[sa.Connection], Result], *runs: str) -> Result:
        """Idempotent work in such a transaction, done again when the connection is lost."""

        def done() -> Result:
            with self._writing(*runs) as connection:
                return work(connection)

        return retried(done)

    def _run(self, id: str) -> RunRecord:
        """What of it does not change."""
        if id not in self._runs:
            self._runs[id] = self.run(id)
        return self._runs[id]
