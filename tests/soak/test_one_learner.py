"""A run has one learner: another one is refused, and one that was taken for dead writes nothing more."""

from __future__ import annotations

import hashlib
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentloop.runs.checkpoint import newest_checkpoint
from replay.store import ReplayStore
from tests.fakes.run_roles import ENGINE_ROLE, LEARNER, Roles, roles_config, running_roles
from tests.fakes.runs import buffer_of, rows, run_identity, save_qwen2

pytestmark = pytest.mark.soak
LEASE_S, DATABASE = 2.0, "replay.sqlite"
SECOND, THIRD = "learner-2", "learner-3"
TABLES = ("draws", "iterations", "policies", "metrics", "planned_batches", "sampler_state", "runs")


def written(run: Path) -> dict[str, Any]:
    """All that a learner writes, in the database and in the folder."""
    database = buffer_of(run)
    found: dict[str, Any] = {table: sorted(map(repr, rows(database, f"select * from {table}"))) for table in TABLES}
    found["issued"] = rows(database, "select number, member, closed_at, late_at from tickets order by 1, 2")
    found["engines"] = rows(database, "select facts from engines")
    files = [path for path in run.rglob("*") if path.is_file() and path.suffix != ".log" and DATABASE not in path.name]
    return found | {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refusal(roles: Roles, role: str) -> str:
    """What a learner said that ended by itself."""
    assert roles.processes[role].wait() == 2, roles.printed(role)
    (line,) = [line for line in roles.printed(role).splitlines() if line.startswith("agentloop: ")]
    return line


@pytest.mark.timeout(1500)
def test_a_second_learner_is_refused_and_one_without_its_lease_stops(tmp_path: Path) -> None:
    model = save_qwen2(tmp_path / "model")
    settings = roles_config(
        tmp_path,
        model,
        {"max_staleness": 1, "lease_s": LEASE_S},
        run={"name": "small", "folder": str(tmp_path), "iterations": 400, "seed": 0},
        evaluation={"every": 0, "tasks": 4},
    )
    roles = Roles(tmp_path, settings)
    with running_roles(roles, [ENGINE_ROLE, LEARNER, "worker-1"]):
        roles.until(lambda: (found := roles.look()) is not None and found.fresh > 0)
        roles.start(SECOND)
        assert "run.folder must be used by one process at a time" in refusal(roles, SECOND)
        assert roles.is_running(LEARNER)

        roles.stop(LEARNER)
        time.sleep(LEASE_S + 0.5)
        run = str(run_identity(roles.run).id)
        checkpoint = newest_checkpoint(roles.run / "checkpoints")
        assert checkpoint is not None
        with closing(ReplayStore.open(buffer_of(roles.run))) as store:
            store.roles.lead(run, "elsewhere:/runs", lease_s=600)
            store.resume(run, int(checkpoint.folder.name))
            before = written(roles.run)
            roles.go_on(LEARNER)
            began = time.monotonic()
            assert "'elsewhere:/runs' in the place of" in refusal(roles, LEARNER)
            took = time.monotonic() - began
            assert written(roles.run) == before
            roles.start(THIRD)
            assert "while 'elsewhere:/runs' leads" in refusal(roles, THIRD)
            assert written(roles.run) == before
            store.roles.stop_leading(run, "elsewhere:/runs")
        print(f"a learner without its lease of {LEASE_S} s was gone after {took:.1f} s")
        fresh = rows(buffer_of(roles.run), "select count(*) from iterations")[0][0]
        roles.start(LEARNER)
        roles.until(lambda: rows(buffer_of(roles.run), "select count(*) from iterations")[0][0] > fresh + 1)
    assert took < 60  # generously: a machine under load wakes it late
