"""`ReplayStore`: the one object that writes experience into the database and reads it."""

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
from replay.sampling.base_sampler import Sampler
from replay.sampling.draw import RunDraws
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

_ROWS_AT_ONCE = 2_000
"""Rows that one transaction of `purge` deletes."""


class ReplayStore:
    """Experience at rest. Every method is one transaction: complete when it returns, without effect when it raises.

    If a disk or a server fails at the very end, the outcome may be unknown: DatabaseFailed says so.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.url, self.path = database.url, database.path
        """The database's URL without a password, for people; and its file, if it is one."""
        self.reading, self.size, self.close = database.reading, database.size, database.close
        self.naming_damage = database.naming_damage
        """For code that works on values read from the database."""
        self._runs: dict[str, RunRecord] = {}
        self._newest: RunDraws | None = None
        """The draws of the run used last. Each holds every row in memory, so only one is kept."""
        self._lock = Lock()
        self._epochs: dict[str, int] = {}
        """Epochs of the runs that this store began or resumed. A write to one fails if another process resumed it."""
        self.tickets = Tickets(database, self._write, self._run)
        self.roles = Roles(database)
        self.sessions = Sessions(database, lambda work: self._write(work, *self._epochs))
        self.labels = Labels(self._write)

    @classmethod
    def create(cls, location: Location) -> ReplayStore:
        """The database opened for writing; it is created if it does not exist."""
        return cls(create_database(location))

    @classmethod
    def open(cls, location: Location, *, read_only: bool = False) -> ReplayStore:
        """An existing database, opened. Raises DatabaseRefused if there is none."""
        return cls(open_database(location, read_only=read_only))

    def add_run(self, run: RunRecord) -> None:
        """Store a run. A known run must have the same authors, and gets this configuration. If nobody has resumed the
        run yet, this store may write it until another process does: see `resume`."""
        if self._write(lambda connection: write.add_run(connection, run)) == 0:
            self._epochs.setdefault(run.id, 0)

    def add_policy(self, policy: PolicyRecord) -> None:
        """Store a published policy. A policy published again after a resume replaces the lost one."""
        self._write(lambda connection: write.add_policy(connection, policy), policy.run)

    def run(self, id: str | None = None) -> RunRecord:
        """The run with that id, or the only run."""
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
        created_at: Mapping[str, str] = {},
    ) -> AppendReport:
        """Store whole trajectories with their groups and tasks; a stored trajectory counts as a duplicate.

        `ended` are ids of sessions to end, and `created_at` the times, by id, of rows that come from elsewhere. Raises
        InvalidRecord naming the field, also for another row with a stored id, and SessionForgotten if a session is not
        stored. Then nothing has been stored.
        """
        runs_by_id = {id: self._run(id) for id in {t.record.run for t in trajectories}}
        compressed = self._database.compresses_text
        prepared = write.prepare(tasks, groups, trajectories, runs_by_id, redact=redact, compress_text=compressed)
        written = {record.run for record in groups} | runs_by_id.keys()

        def work(connection: sa.Connection) -> AppendReport:
            report = write.append(connection, prepared, created_at)
            if ended and sessions.end(connection, ended) < len(ended) and report.inserted:
                raise SessionForgotten(f"ended must be of sessions that are stored, got {', '.join(ended)}.")
            return report

        return self._write(work, *written)

    def check(
        self,
        tasks: Sequence[TaskRecord],
        groups: Sequence[GroupRecord],
        trajectories: Sequence[Trajectory],
        runs_by_id: Mapping[str, RunRecord],
    ) -> None:
        """Raise what `append` would raise, and store nothing. `runs_by_id` are the runs of the rows by id."""
        prepared = write.prepare(tasks, groups, trajectories, runs_by_id, compress_text=self._database.compresses_text)
        self._database.read(lambda connection: write.missing_rows(connection, prepared))

    def remember(self, records: Sequence[ObservationRecord]) -> None:
        """Store answers of deterministic tools. An answer already stored stays as it is; the tasks must be stored."""
        if records:
            self._write(lambda connection: never_drawn.remember(connection, records))

    def remembered(self, environment: str, tasks: Sequence[str]) -> list[ObservationRecord]:
        """The stored answers of an environment's tools for these tasks."""
        return self._database.read(lambda connection: never_drawn.remembered(connection, environment, tasks))

    def read(self, ids: Sequence[str]) -> list[Trajectory]:
        """The whole trajectories of these ids, in order. A damaged one is quarantined and raises CorruptTrajectory."""
        loaded = self._database.read(lambda connection: read.load(connection, ids))
        if loaded.corrupt and not self._database.read_only:
            self.quarantine(loaded.corrupt)
        return loaded.in_order(ids)

    def available(self, request: DrawRequest, sampler: Sampler) -> Availability:
        """The number of rows that a draw could take; `request.picks` play no part."""

        def counted() -> Availability:
            with self._run_draws(request) as run_draws, self._database.reading() as connection:
                return run_draws.trial(connection, request, sampler).available()

        return retried(counted)

    @contextmanager
    def trial_draw(self, request: DrawRequest, sampler: Sampler) -> Iterator[TrialDraw]:
        """A draw that reserves nothing. Nobody else draws from this store meanwhile."""
        with self._run_draws(request) as run_draws, self._database.reading() as connection:
            yield run_draws.trial(connection, request, sampler)

    def draw(self, request: DrawRequest, sampler: Sampler) -> list[BatchRow]:
        """Select and reserve rows in the order of the picks; fewer than requested if there are not enough.

        A corrupt row is quarantined, and another is drawn. Raises ReplayError if rows of a named source are not
        comparable.
        """
        checked([request], "draw of iteration", "iteration")
        begun = sampler.state()

        def drawn() -> list[BatchRow]:
            sampler.load_state(begun)
            with self._run_draws(request) as run_draws:
                # Many rows may be new. Writers need not wait until they are read and weighed.
                with self._database.reading() as connection:
                    run_draws.prepare(connection, request, sampler)
                with self._writing(request.run) as connection:
                    return run_draws.draw(connection, request, sampler)

        return retried(drawn)

    @contextmanager
    def _run_draws(self, request: DrawRequest) -> Iterator[RunDraws]:
        """The rows that the run draws from. They are read again after an error, for it may have rolled some back."""
        with self._lock:
            if self._newest is None or self._newest.run != request.run:
                self._newest = RunDraws(request.run)
            try:
                yield self._newest
            except BaseException:
                self._newest = None
                raise

    def reserve_fresh(self, records: Sequence[DrawRecord]) -> None:
        """Reserve the slots of the iteration's own rows, in place of earlier reservations of the same slots."""
        self._write(
            lambda connection: draw_records.reserve_again(connection, records), *{record.run for record in records}
        )

    def commit(
        self, iteration: IterationRecord, records: Sequence[DrawRecord], *, sampler_state: Mapping[str, Any]
    ) -> None:
        """Store an update: its draws with their statistics, its iteration and metrics, and the sampler after it.
        `records` are exactly the iteration's reserved draws, in any order. A repeated commit changes nothing."""
        self._write(
            lambda connection: draw_records.commit(connection, iteration, records, sampler_state=sampler_state),
            iteration.run,
        )

    def add_metrics(self, run: str, iteration: int, metrics: Mapping[str, float]) -> None:
        """Store metrics measured outside an update, for example by an evaluation. A stored name gets the new value."""
        self._write(lambda connection: write.add_metrics(connection, run, iteration, metrics), run)

    def add_scores(self, run: str, version: int, scores: Mapping[tuple[str, int], npt.NDArray[np.float32]]) -> None:
        """Store log-probs of stored segments, by (trajectory, position), under policy `version` of `run`. They replace
        earlier ones: [T] float32 nats, NaN for tokens that were not sampled."""
        self._write(lambda connection: write.add_scores(connection, run, version, scores), run)

    def resume(self, run: str, iteration: int) -> ResumeReport:
        """Take the run back to its state after committing `iteration`, whatever a crash left behind. From now on only
        this store may write the run: earlier writers get RunReplaced."""
        with self._lock:
            # The draws in memory hold groups that are undone now.
            self._newest = None

        def work(connection: sa.Connection) -> tuple[int, ResumeReport]:
            epoch = counters.take_over(connection, run)
            retention.restore(connection, run, iteration)
            again = fresh_groups.make_fresh_again(connection, run, iteration)
            return epoch, replace(draw_records.resume(connection, run, iteration), fresh_again=again)

        self._epochs[run], report = self._write(work)
        return report

    def refuse_replaced(self, run: str) -> None:
        """Raises RunReplaced if another process has resumed the run. No transaction guards the run's files."""
        if run in self._epochs:
            self._database.read(lambda connection: counters.refuse_replaced(connection, run, self._epochs[run]))

    def evict(self, run: str, iteration: int, capacity: Capacity) -> dict[str, float]:
        """Evict the rows of `run` that are over its capacity after `iteration`, and return metrics of the buffer. The
        rows stay stored until `purge`, so that a resume from an earlier iteration can restore them."""

        def work(connection: sa.Connection) -> dict[str, float]:
            over = retention.over_capacity(connection, run, iteration, capacity)
            evicted = retention.evict(connection, over, iteration=iteration)
            return retention.buffer_metrics(connection, run) | evicted.metrics()

        return self._write(work, run) if capacity else self._database.read(work)

    def purge(self, run: str, iteration: int) -> int:
        """Delete the rows evicted up to `iteration`, and return their number. No resume may go back before it."""
        ids = self._database.read(lambda connection: retention.evicted_through(connection, run, iteration))
        for start in range(0, len(ids), _ROWS_AT_ONCE):
            self._write(partial(tombstones.reclaim, ids=ids[start : start + _ROWS_AT_ONCE]), run)
        return len(ids)

    def prune(self, run: str | None = None, *, rows: sa.ColumnElement[bool], dry_run: bool) -> Evicted:
        """Evict for good the rows that a person chose from `run`, or from every run; `dry_run` only counts them."""
        work = partial(retention.prune, run=run, rows=rows, dry_run=dry_run)
        return self._database.read(work) if dry_run else self._database.write(work)

    def compact(self) -> tuple[int, int]:
        """Free the disk space of evicted and forgotten rows; returns the bytes before and after. Waits for other
        writers. Raises ReplayError if readers or a full disk prevent the rewrite."""
        before = self._database.read(self._database.size)
        self._database.erase(lambda connection: None)
        return before, self._database.read(self._database.size)

    def keep_held_out(self, run: str, episodes: Sequence[HeldOutEpisode], *, evaluations: int) -> None:
        """Store the episodes of an evaluation, replacing earlier ones of the same number, and delete all but the run's
        newest `evaluations`."""

        def work(connection: sa.Connection) -> None:
            never_drawn.put_episodes(connection, episodes, compressed=self._database.compresses_text)
            never_drawn.delete_older_evaluations(connection, run, evaluations)

        self._write(work, run)

    def forget(self, rows: sa.ColumnElement[bool] | None, *, held_out: str | None = None, dry_run: bool) -> Forgotten:
        """Remove the content of `rows` for good, and rewrite the database without it; `dry_run` only counts it.

        `held_out` names a run whose held-out episodes and open sessions go too; "*" means every run.
        """
        chosen = sa.false() if rows is None else rows
        work = partial(tombstones.forget, rows=chosen, of_run=held_out, dry_run=dry_run)
        return self._database.read(work) if dry_run else self._database.erase(work)

    def verify(self, wanted: sa.ColumnElement[bool] | None = None) -> Verification:
        """Read and check every row, or the `wanted` rows: see `replay.storage.verify`."""
        return verify(self._database, sa.true() if wanted is None else wanted)

    def quarantine(self, reasons: Mapping[str, str]) -> None:
        """Set corrupt rows aside, so that they are never drawn again. `reasons` are by id."""
        self._write(lambda connection: read.quarantine(connection, reasons))

    @contextmanager
    def _writing(self, *runs: str) -> Iterator[sa.Connection]:
        """A transaction that writes these runs. Raises RunReplaced if this store began or resumed one of them and
        another process has resumed it since."""
        with self._database.writing() as connection:
            for run in self._epochs.keys() & set(runs):
                counters.refuse_replaced(connection, run, self._epochs[run])
            yield connection

    def _write(self, work: Callable[[sa.Connection], Result], *runs: str) -> Result:
        """Do idempotent work in a transaction of `_writing`. The work is repeated if the connection is lost."""

        def done() -> Result:
            with self._writing(*runs) as connection:
                return work(connection)

        return retried(done)

    def _run(self, id: str) -> RunRecord:
        """The run's record from memory. Its configuration may be an old one."""
        if id not in self._runs:
            self._runs[id] = self.run(id)
        return self._runs[id]
