"""Workers, the learner and the engine of a run are killed again and again: nothing that was collected is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.run_roles import ENGINE_ROLE, LEARNER, Roles, running_roles
from tests.fakes.runs import buffer_of, rows, save_qwen2
from tests.invariants.test_collected_by_workers import config

pytestmark = pytest.mark.soak
ROUNDS = 10
WORKERS = ("worker-1", "worker-2")


@pytest.mark.timeout(1800)
def test_a_run_outlives_ten_kills_of_each_role(tmp_path: Path) -> None:
    model = save_qwen2(tmp_path / "model")
    run = {"name": "small", "folder": str(tmp_path), "iterations": 60, "seed": 0}
    evaluation = {"every": 0, "tasks": 8}
    given = config(tmp_path, model, {"max_staleness": 2, "lease_s": 3}, run=run, evaluation=evaluation)
    roles = Roles(tmp_path, given, engine_words=["--silence", "10"])
    with running_roles(roles, [ENGINE_ROLE, LEARNER, *WORKERS]):
        roles.until(lambda: (found := roles.look()) is not None and found.fresh > 0)
        for number in range(ROUNDS):
            for role in (WORKERS[number % 2], LEARNER, ENGINE_ROLE):
                if not roles.is_running(LEARNER):
                    break
                if role == ENGINE_ROLE:
                    roles.kill_server()
                else:
                    roles.kill(role)
                    roles.start(role)
                fresh = roles.look()
                assert fresh is not None
                roles.until(
                    lambda least=fresh.done: (
                        ((f := roles.look()) is not None and f.done > least) or not roles.is_running(LEARNER)
                    )
                )
        roles.until(lambda: not roles.is_running(LEARNER), limit_s=900)
        assert roles.processes[LEARNER].returncode == 0, roles.printed(LEARNER)
    found = roles.look()
    assert found is not None
    print(f"{ROUNDS} kills of each role: {found}")
    database = buffer_of(roles.run)
    twice = "select trajectory from draws where stream = 'fresh' and state = 'committed' group by 1 having count(*) > 1"
    assert rows(database, twice) == []
    assert rows(database, "select max(staleness) from draws where stream = 'fresh'")[0][0] <= 2
