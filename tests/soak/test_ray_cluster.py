"""Roles on a real Ray: each is killed and comes back, all leave with the learner, and what can't fit is refused."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.launched import NAMES, STAYS, Launch, left_over, starts, words, write_roles
from tests.fakes.processes import stat, until

pytestmark = [pytest.mark.soak]
pytest.importorskip("ray", reason="the extra ray is not installed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray with more cores than this machine has."""
    ray: Any = pytest.importorskip("ray")
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.mark.parametrize("killed", ["command", "actor"])
def test_each_role_comes_back_after_kill_9_and_leaves_at_the_end(killed: str, cluster: str, tmp_path: Path) -> None:
    file = write_roles(tmp_path, ray={"address": cluster})
    with Launch(file, "--on", "ray") as launch:
        run = launch.run
        until(lambda: all(starts(run, name) for name in NAMES), lambda: launch.output)
        for name in NAMES:
            began, pid = time.monotonic(), starts(run, name)[-1]
            os.kill(pid if killed == "command" else stat(Path(f"/proc/{pid}"))[1], signal.SIGKILL)
            until(lambda: len(starts(run, name)) == 2, lambda: launch.output)  # noqa: B023
            print(f"{name}, {killed} killed: back after {time.monotonic() - began:.1f} s")
            assert pid not in left_over(run)
        if killed == "command":
            (run / "end").touch()
        else:
            launch.send(signal.SIGTERM)
        assert launch.wait() == (0 if killed == "command" else 143), launch.output
    assert left_over(run) == []
    assert "worker-1 | worker-1 is up" in launch.output


@pytest.mark.parametrize("alone", [True, False], ids=["on this machine", "on a cluster"])
def test_roles_that_do_not_fit_are_refused_by_name_within_a_minute(alone: bool, cluster: str, tmp_path: Path) -> None:
    roles = {
        "learner": {"command": words(STAYS, "learner")},
        "worker": {"count": 8, "cpus": 400, "command": words(STAYS, "worker-{index}")},
    }
    began = time.monotonic()
    file = write_roles(tmp_path, roles, ray={"address": None if alone else cluster})
    with Launch(file, "--on", "ray") as launch:
        assert launch.wait() == 2
    print(f"refused after {time.monotonic() - began:.1f} s")
    said = "roles must fit the cluster, got learner 1 x 1 cpus and 0 gpus, worker 8 x 400 cpus and 0 gpus where"
    assert said in launch.output
