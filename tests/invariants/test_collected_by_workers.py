"""A run that workers collect for: staleness is bounded, the mix exact, and nothing that was collected is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentloop.config import RunConfig
from tests.fakes.postgres_servers import LocalServer
from tests.fakes.role_kills import kill_all
from tests.fakes.run_roles import ENGINE_ROLE, LEARNER, Roles, running_roles
from tests.fakes.runs import buffer_of, rows, save_qwen2, small_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("model"))


def config(folder: Path, model: Path, collection: dict[str, Any], **sections: Any) -> RunConfig:
    return small_config(
        folder,
        model,
        **{
            "run": {"name": "small", "folder": str(folder), "iterations": 6, "seed": 0},
            "rollout": {"engine": "vllm", "temperature": 0.7, "max_turns": 2, "max_tokens_per_turn": 12},
            "engine": {"urls": ["http://127.0.0.1:1"]},
            "loss": {"fresh": {"anchor": "behavior"}},
            "collection": {"by": "workers", "lease_s": 5, **collection},
            **sections,
        },
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_by_workers_ends_with_every_row_in_its_bound(tmp_path: Path, model: Path, staleness: int) -> None:
    roles = Roles(tmp_path, config(tmp_path, model, {"max_staleness": staleness}))
    with running_roles(roles, [ENGINE_ROLE, LEARNER, "worker-1", "worker-2"]):
        roles.until(lambda: not roles.is_running(LEARNER))
        assert roles.processes[LEARNER].returncode == 0, roles.printed(LEARNER)
        roles.until(lambda: not (roles.is_running("worker-1") or roles.is_running("worker-2")))
    found = roles.look()
    assert found is not None
    assert (found.late, found.unused, found.open, found.failed) == (0, 0, 0, 0)
    database = buffer_of(roles.run)
    drawn = rows(database, "select iteration, stream, count(*) from draws group by 1, 2 order by 1, 2")
    fresh = {iteration: count for iteration, stream, count in drawn if stream == "fresh"}
    assert set(fresh) == set(range(1, 7))
    assert all(fresh[i] + {(i, s): c for i, s, c in drawn}.get((i, "replay"), 0) == 16 for i in fresh)
    worst = rows(database, "select max(staleness) from draws where stream = 'fresh'")[0][0]
    assert worst == staleness


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_run_on_postgres_outlives_a_kill_of_each_role(tmp_path: Path, model: Path, own_server: LocalServer) -> None:
    run = {"name": "small", "folder": str(tmp_path), "iterations": 20, "seed": 0}
    database = own_server.url(own_server.new_database(empty=True))
    given = config(tmp_path, model, {"max_staleness": 1, "lease_s": 3}, run=run, replay={"database": database})
    kill_all(
        Roles(tmp_path, given, engine_words=["--silence", "10"]), workers=4, rounds=1, staleness=1, server=own_server
    )
