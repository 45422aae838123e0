"""Whoever collects, and whatever fails or is late: shares stay exact to half a row, and a run and its resume go on."""

from collections import Counter, namedtuple
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from agentloop.config import RunConfig
from agentloop.errors import TrainingStopped
from agentloop.training.collecting.collection import BatchForgotten
from replay.records import OPEN_GROUP
from replay.storage.format.schema import trajectories
from tests.fakes.engine_server import EngineServer
from tests.fakes.runs import rows, small_config
from tests.fakes.worker_runs import made_run

pytestmark = pytest.mark.timeout(300)

ITERATIONS = 100
FIRST = 6
"""The batch from which on rows are replayed: whatever is planned ahead, the buffer has enough for it by then."""
CONSTANT: dict[str, Any] = {"fraction": 0.23}
FALLING: dict[str, Any] = {"fraction": 0.47, "schedule": {"shape": "linear", "final": 0.11}}
BATCHES = """select fraction, fresh, replay,
             (select count(*) from draws d where d.iteration = i.iteration and d.stream = 'fresh'),
             (select count(*) from draws d where d.iteration = i.iteration and d.stream = 'replay')
             from iterations i order by iteration"""


Batch = namedtuple("Batch", ["fraction", "fresh", "replay", "drawn_fresh", "drawn_replay"])
"""What an iteration says of its batch, and what its draws say."""


def by_workers(server: EngineServer, staleness: int) -> dict[str, dict[str, Any]]:
    return {
        "rollout": {"engine": "vllm"},
        "engine": {"urls": [server.address]},
        "loss": {"fresh": {"anchor": "behavior"}},
        "collection": {"by": "workers", "max_staleness": staleness},
    }


BOUNDS = (None, 0, 1, 3)
"""On staleness; without one the loop collects."""
QUICK = (3, FALLING)


@pytest.mark.parametrize(
    ("staleness", "replay"),
    [
        pytest.param(bound, replay, marks=() if (bound, replay) == QUICK else pytest.mark.soak)
        for bound in BOUNDS
        for replay in (CONSTANT, FALLING)
    ],
)
def test_every_mode_replays_the_declared_share(
    tmp_path: Path, server: EngineServer, staleness: int | None, replay: dict[str, Any]
) -> None:
    config = small_config(
        tmp_path,
        server.models.folder,
        run={"iterations": ITERATIONS},
        replay={**replay, "start": {"iteration": FIRST}},
        **({} if staleness is None else by_workers(server, staleness)),
    )
    with made_run(config) as run:
        for _ in range(ITERATIONS):
            run.iterate()
        counts = run.counts
    found = [Batch(*row) for row in rows(tmp_path / "small-001" / "replay.sqlite", BATCHES)]
    off = [Fraction(0)]
    for number, batch in enumerate(found, start=1):
        assert (batch.fresh, batch.replay, batch.fresh + batch.replay) == (batch.drawn_fresh, batch.drawn_replay, 16)
        if batch.replay or number >= FIRST:
            off.append(off[-1] + 16 * Fraction(batch.fraction) - batch.replay)
    worst = max(map(abs, off))
    print(f"at most {float(worst):.3f} rows off")
    assert sum(batch.replay for batch in found) > 100
    assert worst <= Fraction(1, 2)
    if staleness is not None:
        collected = (counts.queued, counts.leased, counts.open, counts.waiting, counts.late, counts.unused)
        assert (collected, counts.fresh) == ((0,) * 6, counts.done)
    assert found[-1].fraction == pytest.approx(config.mix_rule().fraction_at(ITERATIONS), abs=0.03)


SHORT = 24


def by_two(folder: Path, server: EngineServer, **sections: dict[str, Any]) -> RunConfig:
    return small_config(folder, server.models.folder, run={"iterations": SHORT}, **by_workers(server, 1), **sections)


def test_a_task_that_always_fails_is_tried_in_two_batches_and_no_more(tmp_path: Path, server: EngineServer) -> None:
    """One in seven fails: were each put back for ever, a batch would soon be made of such tasks alone."""
    with made_run(by_two(tmp_path, server, batch={"trajectories": 32, "group_size": 4, "mini_batch": 16})) as run:
        run.fails = lambda claim: int(claim.task.hash, 16) % 7 == 0
        for _ in range(SHORT):
            run.iterate()
        counts = run.counts
    tickets = "select task, count(distinct number), max(state) from tickets where state = '{}' group by task"
    database = tmp_path / "small-001" / "replay.sqlite"
    failed = rows(database, tickets.format("failed"))
    print(f"{len(failed)} tasks failed, in {Counter(batches for _, batches, _ in failed)} batches: {counts}")
    assert len(failed) > 5
    assert {batches for _, batches, _ in failed[:-2]} <= {1, 2}
    assert counts.fresh == counts.done == counts.rows
    assert rows(database, "select count(*) from iterations where fresh = 0") == [(0,)]


@pytest.mark.parametrize("others", [None, "failed", "damaged"])
def test_a_run_goes_on_where_all_that_was_collected_of_a_batch_is_forgotten(
    tmp_path: Path, server: EngineServer, others: str | None
) -> None:
    """Where other things happened to some of its episodes, as after any batch of which nothing came."""
    with made_run(by_two(tmp_path, server)) as run:
        run.in_time = 0.0
        run.iterate()
        run.fails = lambda claim: others == "failed" and claim.ticket.member == 0
        run.collect(16)
        store, of_batch = run.loop.components.store, trajectories.c.state == OPEN_GROUP
        with store.reading() as connection:
            ids = connection.scalars(sa.select(trajectories.c.id).where(of_batch, trajectories.c.member == 1)).all()
        store.quarantine(dict.fromkeys(ids if others == "damaged" else (), "damaged"))
        store.forget(of_batch, dry_run=False)
        with pytest.raises(TrainingStopped if others else BatchForgotten):
            run.iterate()
        if others:
            run.resume(run.checkpoint())
        while run.loop.state.iteration < SHORT:
            run.iterate()
    again = "select count(*) from (select task from tickets group by task having count(distinct number) = 2)"
    assert rows(tmp_path / "small-001" / "replay.sqlite", again) == [(4,)]


def test_a_run_that_stopped_as_a_whole_batch_had_failed_goes_on(tmp_path: Path, server: EngineServer) -> None:
    """The engines were gone for too long, say: who has mended that must not find the run stopped for ever."""
    with made_run(by_two(tmp_path, server)) as run:
        for _ in range(3):
            run.iterate()
        run.fails = lambda claim: True
        with pytest.raises(TrainingStopped, match=r"batch [45] must have a trajectory .* it always fails\. Mend that"):
            for _ in range(3):
                run.iterate()
        run.fails = lambda claim: False
        failed = run.counts.failed
        run.resume(run.checkpoint())
        while run.loop.state.iteration < SHORT:
            run.iterate()
        counts = run.counts
    database = tmp_path / "small-001" / "replay.sqlite"
    again = """select count(*) from (select task from tickets group by task
               having max(state = 'failed') and max(state = 'done'))"""
    assert rows(database, again) == [(failed // 4,)]
    assert rows(database, "select count(*) from iterations where fresh > 0") == [(SHORT,)]
    assert (counts.failed, counts.fresh, counts.late, counts.unused) == (failed, counts.done, 0, 0)


def test_batches_of_replayed_rows_alone_take_their_turns(tmp_path: Path, server: EngineServer) -> None:
    replay = {"fraction": 0.0, "schedule": {"shape": "step", "steps": [[0.25, 1.0], [0.5, 0.25]]}}
    with made_run(by_two(tmp_path, server, replay=replay)) as run:
        for _ in range(SHORT // 2):
            run.iterate()
        run.resume(run.checkpoint())
        for _ in range(SHORT // 2):
            run.iterate()
    # Iteration i of 24 is at (i - 1) / 23 of the run: the quarter is passed at 7, the half at 13.
    sizes = rows(tmp_path / "small-001" / "replay.sqlite", "select fresh, replay from iterations order by iteration")
    assert sizes == [(16, 0)] * 6 + [(0, 16)] * 6 + [(12, 4)] * 12
