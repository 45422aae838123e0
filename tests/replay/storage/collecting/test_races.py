"""Workers in processes of their own: no ticket twice, nothing lost, and every finished episode in its place."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

from replay import ReplayStore
from replay.storage.collecting.fresh_groups import FreshRequest
from replay.storage.databases import Location
from tests.fakes.databases import Databases
from tests.fakes.records import RUN, iteration_record, measured, new_store, sql
from tests.replay.storage.collecting.episodes import WorkerProcess, claim, episode, issue
from tests.replay.storage.kill_points import copies, killed_at

GROUPS, SIZE = 30, 4


def test_four_processes_claim_no_ticket_twice(location: Location) -> None:
    with closing(new_store(location)) as store:
        issue(store, range(GROUPS), size=SIZE)
        said = [each for worker in [WorkerProcess.start(location, n) for n in range(4)] for each in worker.said()]
        claimed = Counter((number, member) for what, number, member, _ in said if what == "claimed")
        assert (len(claimed), set(claimed.values())) == (GROUPS * SIZE, {1})
        assert Counter(what for what, *_ in said) == {"claimed": GROUPS * SIZE, "finished": GROUPS * SIZE}
        assert (store.tickets.counts(RUN).done, store.tickets.counts(RUN).open) == (GROUPS * SIZE, GROUPS * SIZE)


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
        for number in range(6):
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
        assert len(finished) <= found.done <= len(finished) + 6 * 3
        assert (found.done, found.open, found.failed) == (GROUPS * SIZE, GROUPS * SIZE, 0)


def contents(location: Location) -> list[Any]:
    tables = ("trajectories", "segments", "messages", "groups")
    ends = "select number, member, state, holder, fence, trajectory from tickets order by number, member"
    return [*(sql(location, f"select count(*) from {table}") for table in tables), sql(location, ends)]


def finish_both(location: Location, told: Callable[[], None]) -> None:
    with closing(ReplayStore.open(location)) as store:
        held = claim(store, "doomed", count=2)
        told()
        assert store.tickets.finish([(each, episode(each)) for each in held]) == [True, True]
        told()


def test_kill_in_the_middle_of_a_finish_leaves_all_or_nothing(databases: Databases) -> None:
    with copies(databases) as made:
        with closing(new_store(made.prepared)) as store:
            issue(store, [0])
        states = [contents(made.prepared)]
        whole = made.new()
        finish_both(whole, lambda: states.append(contents(whole)))
        steps = killed_at(None, finish_both, made.new()).steps
        assert steps is not None and steps > 10
        ends = set()
        for step in sorted({*range(0, steps, 1 if databases.is_sqlite else 3), steps - 1}):
            location = made.new()
            told = killed_at(step, finish_both, location).told
            found = states.index(contents(location))
            assert found in (told, told + 1), f"killed at step {step}"
            ends.add(found)
            made.drop(location)
        assert ends == {0, 1, 2}
