"""`agentloop launch` with the real roles: each is killed and comes back, and the run ends with what it should learn."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentloop.engines.serving.engine_process import free_port
from tests.fakes.launched import Launch, left_over
from tests.fakes.processes import stat, until
from tests.fakes.runs import ROOT, rows
from tests.soak.test_quickstart import evaluations, worst_log_prob_error
from tests.vllm.server import SMALL, SMALL_MACHINE, beside_a_learner, missing

pytestmark = [pytest.mark.soak, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
FIRST_WORDS = {"worker-0": "collecting for", "worker-1": "collecting for", "learner": "resumed", "engine-0": "starting"}
"""What each role says once it is back."""
BACK_S = 30.0


@pytest.mark.timeout(3600)
def test_quickstart_learns_while_each_role_is_killed(warmed_up: Path, tmp_path: Path) -> None:
    file = write_quickstart(tmp_path, warmed_up)
    with Launch(file, place=environment(tmp_path)) as launch:
        for number, name in enumerate(FIRST_WORDS):
            wait_until(lambda least=number + 1: committed(launch.run) > least, launch)  # type: ignore[misc]
            pid, before, began = leader(launch.run, name), said(launch.run, name), time.monotonic()
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda role=name, old=before: said(launch.run, role) > old, launch)  # type: ignore[misc]
            print(f"{name} killed, back after {time.monotonic() - began:.1f} s")
            assert time.monotonic() - began < BACK_S
        wait_until(lambda: launch.exit_code is not None, launch)
        assert launch.exit_code == 0, launch.output
    success = evaluations(launch.run)
    print(f"{', '.join(f'{share:.1%}' for share in success)} in {committed(launch.run)} iterations")
    assert success[-1] >= 0.9
    # Every stored token is of the version that its row names.
    assert worst_log_prob_error(launch.run) < 1e-3
    assert left_over(launch.run) == []


@pytest.mark.timeout(1800)
def test_two_ranks_learn_with_workers_and_one_goes_on(warmed_up: Path, tmp_path: Path) -> None:
    port = free_port()
    file = write_quickstart(tmp_path, warmed_up, "run.iterations=8", learner={"ranks": 2}, port=port)
    with Launch(file, place=environment(tmp_path)) as launch:
        wait_until(lambda: committed(launch.run) >= 3, launch)
        launch.send(signal.SIGTERM)
        wait_until(lambda: launch.exit_code is not None, launch)
    before = committed(launch.run)
    assert 3 <= before < 8 and left_over(launch.run) == []
    file = write_quickstart(tmp_path, warmed_up, "run.iterations=8", port=port)
    with Launch(file, "--resume", "auto", place=environment(tmp_path)) as again:
        wait_until(lambda: again.exit_code is not None, again)
        assert again.exit_code == 0, again.output
    assert again.run == launch.run and committed(again.run) == 8
    print(f"2 ranks: {before} iterations, then 1 rank up to 8: {evaluations(again.run)}")


def write_quickstart(
    folder: Path, model: Path, *settings: str, learner: dict[str, Any] | None = None, port: int | None = None
) -> Path:
    """The roles of the quickstart: a learner, a vLLM and two workers."""
    given = (
        *(f"run.folder={folder / 'runs'}", f"model.path={model}", "rollout.engine=vllm", "context.max_tokens=1024"),
        *("engine.turn_timeout_s=600", "engine.restart_timeout_s=600"),
        *("collection.by=workers", "collection.max_staleness=1", "collection.lease_s=10"),
        *("loss.fresh.anchor=behavior", "checkpoint.every=1", *settings),
    )
    roles = {
        "learner": learner or {},
        "engine": {"port": port or free_port(), "options": ["--dtype", "float32", "--silence", "120", "--", *SMALL]},
        "worker": {"count": 2, "concurrency": 16},
    }
    file = folder / "roles.yaml"
    config = str(ROOT / "configs" / "quickstart.yaml")
    file.write_text(yaml.safe_dump({"config": config, "set": list(given), "roles": roles}))
    return file


def environment(folder: Path) -> dict[str, str]:
    return {**SMALL_MACHINE, "AGENTLOOP_VLLM": str(beside_a_learner(folder))}


def committed(run: Path) -> int:
    database = run / "replay.sqlite"
    # The file is there a moment before its tables.
    made = database.exists() and rows(database, "select name from sqlite_master where name = 'iterations'")
    return int(rows(database, "select count(*) from iterations")[0][0]) if made else 0


def said(run: Path, name: str) -> int:
    """How often a role said its first words."""
    log = run / "logs" / f"{name}.jsonl"
    return log.read_text().count(FIRST_WORDS[name]) if log.exists() else 0


def leader(run: Path, name: str) -> int | None:
    """The process of a role that all its others come from; None between two starts."""
    pids = left_over(run, f"{name}:")
    first = [pid for pid in pids if os.getsid(pid) == pid and stat(Path(f"/proc/{pid}"))[1] not in pids]
    return first[0] if first else None


def wait_until(holds: Callable[[], bool], launch: Launch) -> None:
    until(lambda: launch.exit_code not in (None, 0) or holds(), lambda: launch.output[-5000:], limit_s=2400)
    assert launch.exit_code in (None, 0), launch.output[-5000:]
