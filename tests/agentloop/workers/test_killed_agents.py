"""A worker is killed in the middle of its agents' sessions: nothing is half, and others play their tickets."""

import json
import random
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest

from replay.storage.databases import Location
from replay.store import ReplayStore
from tests.fakes.agents import three_turns
from tests.fakes.engine_server import EngineServer, serving
from tests.fakes.processes import until
from tests.fakes.records import sql
from tests.fakes.runs import save_qwen2
from tests.fakes.worker_runs import IssuedRun, WorkerProgram, issued_run, worker_config

AT_ONCE = 20


def config_of(folder: Path, server: EngineServer, location: Location, model: Path) -> Any:
    tasks = folder / "tasks.jsonl"
    rows = ({"prompt": f"Say {number}.", "keys": str(folder / "keys")} for number in range(AT_ONCE * 2))
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, dict[str, Any]] = {
        "environment": {"name": "agent", "agent": f"{three_turns.__file__}:solve"},
        "tasks": {"data": str(tasks)},
        "batch": {"trajectories": AT_ONCE, "group_size": 4, "mini_batch": 4},
        "evaluation": {"every": 0},
        "run": {"iterations": 10},
    }
    return worker_config(folder / "runs", model, server, location, **sections)


def pairs(folder: Path) -> list[list[str]]:
    """The base URLs and keys of all agents so far."""
    return [line.split() for line in (folder / "keys").read_text().splitlines()]


def status(url: str, key: str) -> int:
    return httpx2.get(f"{url}/models", headers={"x-api-key": key}).status_code


def in_the_middle(run: IssuedRun, server: EngineServer, chance: random.Random) -> WorkerProgram:
    """A worker whose agents have asked once or twice each, more or less, and wait for replies."""
    server.pauses_at = len(server.requests) + chance.randint(AT_ONCE, 2 * AT_ONCE)
    worker = WorkerProgram(run.folder, "--concurrency", str(AT_ONCE))
    until(lambda: not server.models.going.is_set(), lambda: worker.output, limit_s=600)
    return worker


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


def all_of(location: Location) -> str:
    """What a database holds, with what is compressed in it."""
    with closing(ReplayStore.open(location, read_only=True)) as store:
        rows = repr(list(store.read([id for (id,) in sql(location, "select id from trajectories")])))
    if isinstance(location, Path):
        return rows + "".join(file.read_bytes().decode("latin-1") for file in location.parent.glob(f"{location.name}*"))
    tables = sql(location, "select tablename from pg_tables where schemaname = current_schema()")
    return rows + "".join(repr(sql(location, f'select * from "{name}"')) for (name,) in tables)


@pytest.mark.every_database
@pytest.mark.parametrize(
    "kills",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(10, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
)
def test_sessions_of_a_worker_that_is_killed_are_played_again(tmp_path: Path, location: Location, kills: int) -> None:
    chance, model = random.Random(kills), save_qwen2(tmp_path / "model")
    with serving(model) as server, issued_run(config_of(tmp_path, server, location, model)) as run:
        outputs = []
        for number in range(kills):
            total, before = run.issue(number + 1), len(pairs(tmp_path)) if number else 0
            with in_the_middle(run, server, chance) as killed:
                known = [pair for pair in pairs(tmp_path)[before:] if status(*pair) == 200]
                assert [status(known[0][0], known[1][1]), status(known[1][0], known[0][1])] == [403, 403]
                assert run.counts.done < total
            httpx2.post(f"{server.address}/resume").raise_for_status()
            nothing_is_half(run, location)
            with WorkerProgram(run.folder, "--concurrency", str(AT_ONCE)) as worker:
                until(lambda: run.has_ended, lambda: f"{run.counts} {worker.output}", limit_s=600)
                worker.end_with(signal.SIGTERM, code=143)
            outputs += [killed.output, worker.output]
            assert (run.counts.done, run.counts.failed) == (total, 0)
        nothing_is_half(run, location)
    assert total == kills * AT_ONCE and len(pairs(tmp_path)) > total
    written = "".join(outputs) + all_of(location)
    assert run.id in written
    assert not [key for _, key in pairs(tmp_path) if key in written]
