"""`agentloop launch` with the real roles: ranks of the learner, a vLLM and workers."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from agentloop.engines.serving.engine_process import free_port
from tests.fakes.launched import Launch, left_over
from tests.fakes.processes import until
from tests.fakes.runs import ROOT, rows
from tests.soak.test_quickstart import evaluations
from tests.vllm.server import SMALL, SMALL_MACHINE, beside_a_learner, missing

pytestmark = [pytest.mark.soak, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.mark.timeout(1800)
def test_two_ranks_learn_with_workers_and_one_goes_on(warmed_up: Path, tmp_path: Path) -> None:
    port = free_port()
    file = write_quickstart(tmp_path, warmed_up, port, ranks=2)
    with Launch(file, place=environment(tmp_path)) as launch:
        wait_until(lambda: committed(launch.run) >= 3, launch)
        launch.send(signal.SIGTERM)
        wait_until(lambda: launch.exit_code is not None, launch)
    before = committed(launch.run)
    assert 3 <= before < 8 and left_over(launch.run) == []
    file = write_quickstart(tmp_path, warmed_up, port)
    with Launch(file, "--resume", "auto", place=environment(tmp_path)) as again:
        wait_until(lambda: again.exit_code is not None, again)
        assert again.exit_code == 0, again.output
    assert again.run == launch.run and committed(again.run) == 8
    print(f"2 ranks: {before} iterations, then 1 rank up to 8: {evaluations(again.run)}")


def write_quickstart(folder: Path, model: Path, port: int, **learner: int) -> Path:
    """The roles of the quickstart: a learner, a vLLM and two workers."""
    given = (
        *(f"run.folder={folder / 'runs'}", f"model.path={model}", "rollout.engine=vllm", "context.max_tokens=1024"),
        *("engine.turn_timeout_s=600", "engine.restart_timeout_s=600"),
        *("collection.by=workers", "collection.max_staleness=1", "collection.lease_s=10"),
        *("loss.fresh.anchor=behavior", "checkpoint.every=1", "run.iterations=8"),
    )
    roles = {
        "learner": learner,
        "engine": {"port": port, "options": ["--dtype", "float32", "--silence", "120", "--", *SMALL]},
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


def wait_until(holds: Callable[[], bool], launch: Launch) -> None:
    until(lambda: launch.exit_code not in (None, 0) or holds(), lambda: launch.output[-5000:], limit_s=2400)
    assert launch.exit_code in (None, 0), launch.output[-5000:]
