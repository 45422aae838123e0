"""What fails, or is too late to be fresh, costs its episodes alone: the run goes on, and so does its resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.errors import TrainingStopped
from tests.fakes.engine_server import EngineServer, serving
from tests.fakes.made_runs import made_run
from tests.fakes.runs import rows, save_qwen2, small_config

ITERATIONS = 24
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with serving(save_qwen2(tmp_path_factory.mktemp("model"))) as server:
        yield server


def config(folder: Path, server: EngineServer, **sections: dict[str, Any]) -> RunConfig:
    return small_config(
        folder,
        server.models.folder,
        run={"iterations": ITERATIONS},
        rollout={"engine": "vllm"},
        engine={"urls": [server.address]},
        loss={"fresh": {"anchor": "behavior"}},
        **{"collection": {"by": "workers", "max_staleness": 1}, **sections},
    )


def test_a_task_that_always_fails_is_tried_in_two_batches_and_no_more(tmp_path: Path, server: EngineServer) -> None:
    """One in seven fails: were each put back for ever, a batch would soon be made of such tasks alone."""
    with made_run(config(tmp_path, server, batch={"trajectories": 32, "group_size": 4, "mini_batch": 16})) as run:
        run.fails = lambda claim: int(claim.task.hash, 16) % 7 == 0
        for _ in range(ITERATIONS):
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


def test_a_run_that_stopped_as_a_whole_batch_had_failed_goes_on(tmp_path: Path, server: EngineServer) -> None:
    """The engines were gone for too long, say: who has mended that must not find the run stopped for ever."""
    with made_run(config(tmp_path, server)) as run:
        for _ in range(3):
            run.iterate()
        run.fails = lambda claim: True
        with pytest.raises(TrainingStopped, match=r"batch [45] must have a trajectory .* it always fails\. Mend that"):
            for _ in range(3):
                run.iterate()
        run.fails = lambda claim: False
        failed = run.counts.failed
        run.resume(run.checkpoint())
        while run.loop.state.iteration < ITERATIONS:
            run.iterate()
        counts = run.counts
    database = tmp_path / "small-001" / "replay.sqlite"
    again = """select count(*) from (select task from tickets group by task
               having max(state = 'failed') and max(state = 'done'))"""
    assert rows(database, again) == [(failed // 4,)]
    assert rows(database, "select count(*) from iterations where fresh > 0") == [(ITERATIONS,)]
    assert (counts.failed, counts.fresh, counts.late, counts.unused) == (failed, counts.done, 0, 0)


def test_a_batch_that_a_resume_finds_too_far_ahead_is_for_replay(tmp_path: Path, server: EngineServer) -> None:
    """Between two batches there were updates of replay alone, which are made again only where a batch is waited for."""
    collection = {"by": "workers", "max_staleness": 4, "samples_per_insert": 40.0}
    with made_run(config(tmp_path, server, collection=collection)) as run:
        run.in_time = 0.0
        for _ in range(10):
            run.iterate()
        checkpoint = run.checkpoint()
        while run.loop.state.iteration < ITERATIONS:
            run.iterate()
        assert run.counts.late == 0 and run.loop.state.batches < ITERATIONS // 2
        run.resume(checkpoint)
        while run.loop.state.iteration < ITERATIONS:
            run.iterate()
        counts = run.counts
    print(f"after a resume {counts}")
    assert counts.late > 0
    assert (counts.failed, counts.unused, counts.waiting, counts.open) == (0, 0, 0, 0)
    database = tmp_path / "small-001" / "replay.sqlite"
    assert rows(database, "select max(staleness) <= 4 from draws where stream = 'fresh'") == [(1,)]
    batches = rows(database, "select distinct fresh + replay from iterations")
    assert batches == [(16,)]
