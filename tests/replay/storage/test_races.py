"""Processes that write one buffer at once, and that die: nothing is lost, nothing is there twice. On every database."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from replay import DrawRequest, Limits, Pick, ReplayStore, make_sampler
from replay.storage.collecting.fresh_groups import FreshRequest
from replay.storage.databases import Location
from tests.fakes.records import RUN, FreshRows, iteration_record, measured, new_store, policy, run_record, sql
from tests.replay.storage.collecting.episodes import WorkerProcess, issue
from tests.replay.storage.writers import Writer, begin, check_acknowledged, check_whole, kill_writers, stored_ids

pytestmark = [pytest.mark.slow, pytest.mark.every_database]

GROUPS, SIZE = 30, 4


@pytest.fixture
def begun(location: Location) -> Location:
    begin(location)
    return location


@pytest.mark.parametrize(
    ("writers", "each"), [(4, 25), pytest.param(32, 250, marks=[pytest.mark.soak, pytest.mark.every_server])]
)
def test_writers_lose_nothing_and_a_reader_sees_no_half(begun: Location, writers: int, each: int) -> None:
    """F7: nobody sees an error."""
    running = [Writer.start(begun, number, each) for number in range(writers)]
    seen: list[str] = []
    while any(writer.process.is_alive() for writer in running):
        now = stored_ids(begun)
        check_whole(begun, sorted(set(now) - set(seen)))
        assert set(seen) <= set(now)
        seen = now
    assert check_acknowledged(begun, running) == writers * each
    assert [writer.process.exitcode for writer in running] == [0] * writers


@pytest.mark.parametrize("kills", [8, pytest.param(500, marks=[pytest.mark.soak, pytest.mark.every_server])])
def test_kill_of_a_writer_loses_nothing_that_was_acknowledged(begun: Location, kills: int) -> None:
    kill_writers(begun, kills)
    if isinstance(begun, Path):
        assert sql(begun, "pragma integrity_check") == [("ok",)]


def drain(location: Location, run: str) -> None:
    """A trainer: draws four rows at a time until there are none, and commits what it drew."""
    store = ReplayStore.open(location)
    sampler = make_sampler("uniform", len(run))
    for iteration in range(2, 99):
        limits = Limits(max_uses=3, sources=(RUN,))
        request = DrawRequest(run, iteration, iteration - 1, (Pick(4),), limits=limits)
        drawn = store.draw(request, sampler)
        record = iteration_record(iteration, replay=len(drawn), run=run)
        store.commit(record, [row.draw for row in drawn], sampler_state={})
        if not drawn:
            break
    store.close()


def test_four_trainers_never_use_a_row_more_often_than_allowed(location: Location) -> None:
    store = new_store(location)
    FreshRows(1, rates=(0.5,) * 5, size=8).append_to(store)
    trainers = [f"trainer-{'i' * number}" for number in range(4)]
    for run in trainers:
        store.add_run(run_record(run))
        store.add_policy(policy(0, run=run))
    store.close()
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=drain, args=(location, run)) for run in trainers]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    counts = Counter(dict(sql(location, "select trajectory, count(*) from draws where state = 'committed' group by 1")))
    # 40 rows, three uses each, none lost and none too many.
    assert Counter(counts.values()) == {3: 40}


class Learner:
    """It closes what is whole and learns from one batch of two groups after another."""

    def __init__(self, store: ReplayStore) -> None:
        self.store = store
        self.iteration = self.batch = 1

    def step(self) -> None:
        for group in self.store.tickets.ended_groups(RUN):
            advantages = {row.id: 0.5 for row in self.store.tickets.open_rows(RUN, [group.number])}
            self.store.tickets.close_groups(RUN, [group.number], advantages, policy_version=self.iteration - 1)
            self.look()
        if self.store.tickets.under_way(RUN, self.batch):
            return
        drawn = self.store.tickets.draw_fresh(FreshRequest(RUN, self.iteration, self.batch, self.iteration - 1, 6))
        self.look()
        self.batch += 1
        if drawn.rows:
            records = [row.draw for row in drawn.rows if row.draw is not None]
            self.store.commit(iteration_record(self.iteration, replay=0), measured(records), sampler_state={})
            self.look()
            self.iteration += 1

    def look(self) -> None:
        found = self.store.tickets.counts(RUN)
        assert found.done == found.fresh + found.late + found.unused + found.waiting + found.open, found


def test_every_finished_episode_is_in_its_place_at_every_look(location: Location) -> None:
    with closing(new_store(location)) as store:
        for number in range(GROUPS):
            issue(store, [number], size=SIZE, iteration=1 + number // 2)
        workers = [WorkerProcess.start(location, number, spoiled=0.1, lease_s=0.5) for number in range(3)]
        workers.append(WorkerProcess.start(location, 3, lease_s=0.1, slow_s=0.3))
        learner = Learner(store)
        while any(worker.process.is_alive() for worker in workers):
            learner.step()
        said = [each for worker in workers for each in worker.said()]
        for _ in range(GROUPS):
            learner.step()
        found = store.tickets.counts(RUN)
        finished = Counter((number, member) for what, number, member, _ in said if what == "finished")
        assert set(finished.values()) == {1}
        assert len(finished) == found.done == found.rows
        assert found.done + found.failed == GROUPS * SIZE
        assert (found.queued, found.leased, found.open) == (0, 0, 0)
        assert found.fresh > 0 and found.unused > 0 and found.late > 0
        used = sql(store, "select trajectory from draws where state = 'committed'")
        assert len(used) == len(set(used)) == found.fresh


def test_kills_of_workers_lose_nothing_and_end_every_group(location: Location) -> None:
    with closing(new_store(location)) as store:
        issue(store, range(GROUPS), size=SIZE)
        said = []
        for number in range(3):
            worker = WorkerProcess.start(location, number, lease_s=0.3)
            before, deadline = store.tickets.counts(RUN).done, time.monotonic() + 60
            while store.tickets.counts(RUN).done < before + 5:
                assert time.monotonic() < deadline
            os.kill(worker.process.pid, signal.SIGKILL)
            said += worker.said()
            assert store.tickets.counts(RUN).done == store.tickets.counts(RUN).rows
        time.sleep(0.4)
        said += WorkerProcess.start(location, 99).said()
        finished = Counter((number, member) for what, number, member, _ in said if what == "finished")
        found = store.tickets.counts(RUN)
        assert set(finished.values()) == {1}
        # The last ones of a killed worker may be done and not acknowledged.
        assert len(finished) <= found.done <= len(finished) + 3 * 3
        assert (found.done, found.open, found.failed) == (GROUPS * SIZE, GROUPS * SIZE, 0)
