"""Scripted trainers in processes of their own: iterations without a model, with mistakes, kills and takeovers."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import closing
from dataclasses import dataclass

import pytest

from replay import DatabaseRefused, InvalidRecord, ReplayStore, RunReplaced
from replay.mixing.request import DrawRequest, Limits, Pick
from replay.records import DrawRecord
from replay.sampling.samplers import Sampler, make_sampler
from replay.storage.databases import Location
from replay.storage.retention import Capacity
from tests.fakes.records import FreshRows, iteration_record, policy, run_record, sql, trajectory
from tests.fakes.small_processes import SMALL

TEACHER = "teacher-run"
"""The run of a teacher, whose rows all of them may draw."""
LIMITS = Limits(max_uses=3, cooldown=2)
OWN, TAUGHT = 2, 2
"""Rows an iteration replays: of the trainers' own runs, and of the teacher's."""
FRESH_ROWS = 8
CHECKPOINT = 3
"""Iterations between the moments that a trainer can be resumed from."""
REPLACED = 3
"""Exit code of a trainer whose run was taken over."""


@dataclass
class Trainer:
    """A process that trains one run, from its last checkpoint to its end."""

    run: str
    process: SMALL.Process  # type: ignore[name-defined]  # a context's own class

    @classmethod
    def start(cls, location: Location, run: str, iterations: int) -> Trainer:
        checkpoint = committed(location, run) // CHECKPOINT * CHECKPOINT
        process = SMALL.Process(target=_train, args=(location, run, checkpoint, iterations))
        process.start()
        return cls(run, process)

    def kill(self) -> bool:
        """Whether it was still at work."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        return bool(self.process.exitcode == -signal.SIGKILL)


def committed(location: Location, run: str) -> int:
    return int(sql(location, "select coalesce(max(iteration), 0) from iterations where run = ?", run)[0][0])


def _opened(location: Location) -> ReplayStore:
    """Who begins while the server is away is refused, and begins again."""
    while True:
        try:
            return ReplayStore.open(location)
        except DatabaseRefused:
            time.sleep(0.1)


def _train(location: Location, run: str, at: int, iterations: int) -> None:
    with closing(_opened(location)) as store:
        store.add_run(run_record(run))
        try:
            report = store.resume(run, at)
            sampler = make_sampler("uniform", len(run))
            if report.sampler_state is not None:
                sampler.load_state(report.sampler_state)
            else:
                store.add_policy(policy(0, run=run))
            for iteration in range(at + 1, iterations + 1):
                _iterate(store, run, iteration, sampler, attempt=report.next_attempt)
                if iteration % CHECKPOINT == 0:
                    store.purge(run, iteration - CHECKPOINT)
        except RunReplaced:
            sys.exit(REPLACED)


def _iterate(store: ReplayStore, run: str, iteration: int, sampler: Sampler, *, attempt: int) -> None:
    fresh = FreshRows(iteration, rates=(0.5, 0.25), attempt=attempt, run=run).append_to(store).draws()
    store.reserve_fresh(fresh)
    picks = (Pick(OWN, source="self"), Pick(TAUGHT, source=TEACHER))
    drawn = store.draw(DrawRequest(run, iteration, iteration - 1, picks, FRESH_ROWS, LIMITS), sampler)
    records = [*fresh, *(row.draw for row in drawn)]
    done = iteration_record(iteration, replay=len(drawn), run=run, planned_replay=OWN + TAUGHT)
    if iteration % 4 == 0:
        _err(store, run, records[1:], sampler)
    store.commit(done, records, sampler_state=sampler.state())
    store.add_policy(policy(iteration, run=run))
    store.evict(run, iteration, policy_version=iteration, capacity=Capacity(rows=120))
    store.add_metrics(run, iteration, {"time/iteration": 1.0})


def _err(store: ReplayStore, run: str, wrong: list[DrawRecord], sampler: Sampler) -> None:
    """Mistakes of one trainer: nothing of them is stored."""
    iteration = wrong[0].iteration
    with pytest.raises(InvalidRecord, match="must be the reserved"):
        store.commit(iteration_record(iteration, replay=0, run=run), wrong, sampler_state=sampler.state())
    bad = trajectory(f"bad-{run}-{iteration}", run=run, group=f"nowhere-{run}")
    with pytest.raises(InvalidRecord, match="must be appended with or before its members"):
        store.append([], [], [bad])
