"""A worker is killed in the middle of its agents' sessions: nothing is half, and others play their tickets."""

import json
import signal
from contextlib import closing
from pathlib import Path

import pytest

from replay.storage.databases import Location
from replay.store import ReplayStore
from tests.fakes.agents import three_turns
from tests.fakes.engine_server import serving
from tests.fakes.processes import until
from tests.fakes.records import sql
from tests.fakes.runs import save_qwen2
from tests.fakes.worker_runs import IssuedRun, WorkerProgram, issued_run, worker_config

AT_ONCE = 20


def nothing_is_half(run: IssuedRun, location: Location) -> None:
    """Each row that is there has all of its session, and tells of all that it was asked."""
    with closing(ReplayStore.open(location, read_only=True)) as store:
        found = store.verify()
        assert (found.corrupt, found.damage) == ({}, [])
        rows = list(store.read([id for (id,) in sql(location, "select id from trajectories")]))
    assert len(rows) == run.counts.rows == run.counts.done
    for row in rows:
        assert [node.status for node in row.nodes] == ["trained"] * 3
        assert row.record.num_action_tokens == sum(node.num_sampled for node in row.nodes)


@pytest.mark.slow
@pytest.mark.every_database
def test_sessions_of_a_worker_that_is_killed_are_played_again(tmp_path: Path, location: Location) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": f"Say {number}."}) + "\n" for number in range(AT_ONCE * 2)))
    with serving(save_qwen2(tmp_path / "model")) as server:
        config = worker_config(
            tmp_path / "runs",
            server.models.folder,
            server,
            location,
            environment={"name": "agent", "agent": f"{three_turns.__file__}:solve"},
            tasks={"data": str(tasks)},
            batch={"trajectories": AT_ONCE, "group_size": 4, "mini_batch": 4},
            evaluation={"every": 0},
        )
        with issued_run(config) as run:
            server.models.pace_s, total = 0.2, run.issue(1)
            asked = len(server.requests) + AT_ONCE + 7
            with WorkerProgram(run.folder, "--concurrency", str(AT_ONCE)) as killed:
                until(lambda: len(server.requests) >= asked, lambda: killed.output, limit_s=600)
            assert run.counts.done < total
            nothing_is_half(run, location)
            with WorkerProgram(run.folder, "--concurrency", str(AT_ONCE)) as worker:
                run.until_ended(worker)
                worker.end_with(signal.SIGTERM, code=143)
            assert (run.counts.done, run.counts.failed) == (total, 0)
            nothing_is_half(run, location)
