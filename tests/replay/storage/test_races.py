"""Processes that write one buffer at once, and that die: nothing is lost, nothing is there twice. On every database."""

import random
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from replay import DrawRequest, Limits, Pick, ReplayStore, make_sampler
from replay.storage.databases import Location
from tests.fakes.records import Fresh, add_run, iteration_record, new_store, sql, trajectory
from tests.fakes.small_processes import SMALL
from tests.replay.storage.writers import Writer, begin, check_counts, check_kept, check_whole, stored_ids, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.every_database]


@pytest.fixture
def begun(location: Location) -> Location:
    begin(location)
    return location


@pytest.mark.parametrize(
    ("writers", "each"), [(4, 25), pytest.param(32, 250, marks=[pytest.mark.soak, pytest.mark.every_server])]
)
def test_writers_lose_nothing_and_a_reader_sees_no_half(begun: Location, writers: int, each: int) -> None:
    """F7: nobody sees an error."""
    running = [Writer(begun, number, each) for number in range(writers)]
    seen: list[str] = []
    while any(writer.process.is_alive() for writer in running):
        now = stored_ids(begun)
        check_whole(begun, sorted(set(now) - set(seen)))
        assert set(seen) <= set(now)
        seen = now
    assert check_kept(begun, running) == writers * each
    assert [writer.process.exitcode for writer in running] == [0] * writers


@pytest.mark.parametrize("kills", [8, pytest.param(500, marks=[pytest.mark.soak, pytest.mark.every_server])])
def test_kill_of_a_writer_loses_nothing_that_was_acknowledged(begun: Location, kills: int) -> None:
    """F1: a writer is killed at a random moment, again and again."""
    chance = random.Random(1)
    count = 0
    for number in range(kills):
        writer = Writer(begun, number, 100_000)
        wait_for(lambda count=count: len(stored_ids(begun)) > count)  # type: ignore[misc]  # bound now
        time.sleep(chance.uniform(0.0, 0.05))
        writer.process.kill()
        acknowledged = writer.acknowledged()
        mine = [id for id in stored_ids(begun) if id.startswith(f"{number:03d}-")]
        # The last commit may have been done and not acknowledged.
        assert set(acknowledged) <= set(mine) and len(mine) - len(acknowledged) in (0, 1)
        check_whole(begun, mine)
        count += len(mine)
    check_counts(begun, count)
    # What was killed is sent again, and is there once.
    with closing(ReplayStore.open(begun)) as store:
        again = [trajectory(id) for id in stored_ids(begun)[:100]]
        assert store.append([], [], again).duplicates == len(again)
    assert len(stored_ids(begun)) == count
    if isinstance(begun, Path):
        assert sql(begun, "pragma integrity_check") == [("ok",)]


def drain(location: Location, run: str) -> None:
    """A trainer, wherever its run is: draws four rows at a time until there are none, and commits what it drew."""
    with closing(ReplayStore.open(location)) as store:
        ((last,),) = sql(location, "select coalesce(max(iteration), 1) from iterations where run = ?", run)
        store.resume(run, last)
        sampler = make_sampler("uniform", len(run))
        for iteration in range(last + 1, 99):
            limits = Limits(successful_only=False, max_uses=3, sources=("shared",))
            drawn = store.draw(DrawRequest(run, iteration, iteration - 1, (Pick(4),), limits=limits), sampler)
            record = iteration_record(iteration, replay=len(drawn), run=run)
            store.commit(record, [row.draw for row in drawn], sampler_state={})
            if not drawn:
                break


def test_trainers_that_share_rows_never_use_one_more_often_than_allowed(location: Location) -> None:
    trainers = [f"trainer-{'i' * number}" for number in range(4)]
    with closing(new_store(location)) as store:
        Fresh(1, rates=(0.5,) * 10, size=8, source="shared").append_to(store)
        for run in trainers:
            add_run(store, run)
    processes = {run: SMALL.Process(target=drain, args=(location, run)) for run in trainers}
    for process in processes.values():
        process.start()
    for kills, run in enumerate(trainers[:2]):
        wait_for(lambda at=4 + 40 * kills: len(sql(location, "select 1 from draws")) >= at)  # type: ignore[misc]
        processes[run].kill()
        processes[run].join()
        processes[run] = SMALL.Process(target=drain, args=(location, run))
        processes[run].start()
    for process in processes.values():
        process.join()
    assert [process.exitcode for process in processes.values()] == [0] * 4
    counts = Counter(dict(sql(location, "select trajectory, count(*) from draws where state = 'committed' group by 1")))
    # 80 rows, three uses each, none lost and none too many.
    assert Counter(counts.values()) == {3: 80}
    assert sql(location, "select count(*) from draws where state <> 'committed'") == [(0,)]
