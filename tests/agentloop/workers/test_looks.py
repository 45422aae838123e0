"""How often a worker looks at its run: a small cluster reacts at once, a large one leaves the database in peace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentloop.workers.run_view import Looks
from replay import ReplayStore
from tests.fakes.records import RUN, new_store, sql

LEASE_S = 60.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ReplayStore]:
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        yield store


def report_many(store: ReplayStore, workers: int) -> None:
    store.roles.report("worker", RUN, "w-0", {})
    numbers = "with recursive n(i) as (select 1 union all select i + 1 from n where i < ?) "
    others = "select run, id || i, facts, started_at, seen_at from workers, n"
    if workers > 1:
        sql(store, f"{numbers} insert into workers (run, id, facts, started_at, seen_at) {others}", workers - 1)


@pytest.mark.parametrize(
    ("workers", "busy", "pause_s"),
    [
        (1, False, 0.25),
        (5, False, 0.25),
        (50, False, 2.5),  # 20 looks a second of all of them
        (100, True, 0.25),
        (200, True, 0.5),  # 400 looks a second
        (1_500, False, 45.0),  # never longer than three quarters of the lease
    ],
)
def test_workers_of_a_large_cluster_look_less_often(
    store: ReplayStore, workers: int, busy: bool, pause_s: float
) -> None:
    report_many(store, workers)
    looks = Looks(store, RUN, "w-0", lease_s=LEASE_S)
    looks.look()
    assert looks.pause_s(busy=busy) == pause_s
    sql(store, "update workers set seen_at = seen_at - 61")  # those that are gone slow nobody down
    looks = Looks(store, RUN, "w-0", lease_s=LEASE_S)
    assert not looks.look().has_ended
    assert looks.pause_s(busy=False) == 0.25
    store.roles.end_run(RUN)
    assert looks.look().has_ended


def test_a_report_is_due_a_third_of_a_lease_after_the_last_one(store: ReplayStore) -> None:
    looks = Looks(store, RUN, "w-0", lease_s=LEASE_S)
    assert looks.report_is_due
    looks.report({"state": "waiting"})
    assert not looks.report_is_due
    assert [each.facts for each in store.roles.listed("worker", RUN)] == [{"state": "waiting"}]
    hasty = Looks(store, RUN, "w-1", lease_s=0.0)
    hasty.report({})
    assert hasty.report_is_due
