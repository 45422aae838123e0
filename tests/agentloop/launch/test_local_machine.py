"""Roles on this machine: what dies comes back, and everything leaves with the learner."""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agentloop.errors import UserError
from agentloop.launch.local_machine import assigned_devices
from agentloop.launch.role_commands import RoleMember
from agentloop.launch.roles_file import EngineRole, WorkerRole
from tests.fakes.launched import (
    ENDS_WHEN_THERE_IS_A_FILE,
    STAYS,
    launched,
    left_over,
    starts,
    until,
    words,
    write_roles,
)

NAMES = ("learner", "engine-0", "worker-0", "worker-1")
BEGINS = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from agentloop.config.config_file import load_config
from agentloop.runs.run_folder import create_run_folder
create_run_folder(load_config(Path(sys.argv[2])), Path(sys.argv[1]))
"""
OUTSIDE = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
"""Starts one more process, in a session of its own, as `agentloop engine` starts vLLM."""


def three_roles(folder: Path) -> Path:
    return write_roles(
        folder,
        {
            "learner": {"command": words(ENDS_WHEN_THERE_IS_A_FILE, "learner")},
            "engine": {"command": words(STAYS, "engine-{index}")},
            "worker": {"count": 2, "command": words(STAYS, "worker-{index}")},
        },
    )


def test_each_role_comes_back_after_kill_9_and_all_leave_when_the_learner_has_ended(tmp_path: Path) -> None:
    with launched(three_roles(tmp_path)) as launch:
        run = launch.run
        until(lambda: all(starts(run, name) for name in NAMES), launch.printed)
        for name in NAMES:
            os.kill(starts(run, name)[-1], signal.SIGKILL)
        until(lambda: all(len(starts(run, name)) == 2 for name in NAMES), launch.printed)
        (run / "end").touch()
        assert launch.wait() == 0, launch.printed
    assert all((run / f"{name}.left").read_text() == "asked" for name in NAMES[1:])
    assert left_over(run) == []
    assert "worker-1 | worker-1 is up" in launch.printed
    assert "learner  | [has died with signal 9; started again in 1 s]" in launch.printed
    logged = [json.loads(line) for line in (run / "logs" / "engine-0.jsonl").read_text().splitlines()]
    assert {(entry["role"], datetime.fromisoformat(entry["time"]).tzinfo) for entry in logged} == {("engine-0", UTC)}
    assert [entry["pid"] for entry in logged if entry["event"] == "started"] == starts(run, "engine-0")
    assert [entry["text"] for entry in logged if entry["event"] == "printed"] == ["engine-0 is up"] * 2
    assert any("has died with signal 9" in entry["text"] for entry in logged if entry["event"] == "supervised")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_asks_every_role_to_leave_and_nothing_is_left(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    with launched(three_roles(tmp_path)) as launch:
        run = launch.run
        until(lambda: all((run / "logs" / f"{name}.jsonl").exists() and starts(run, name) for name in NAMES))
        until(lambda: launch.printed.count("is up") == len(NAMES), launch.printed)
        launch.send(number)
        assert launch.wait() == code, launch.printed
    assert all((run / f"{name}.left").exists() for name in NAMES)
    assert left_over(run) == []


def test_what_the_user_must_mend_in_the_learner_ends_all_with_its_code(tmp_path: Path) -> None:
    roles = {
        "learner": {"command": ["sh", "-c", "echo loss must be one of them; sleep 1; exit 2"]},
        "worker": {"command": words(STAYS, "worker-{index}")},
    }
    with launched(write_roles(tmp_path, roles)) as launch:
        assert launch.wait() == 2
    assert "learner must not fail, got exit code 2: loss must be one of them" in launch.printed
    assert left_over(launch.run) == []


def test_a_role_that_does_not_stay_up_ends_the_launch_with_its_last_lines(tmp_path: Path) -> None:
    roles = {
        "learner": {"command": words(STAYS, "learner")},
        "judge": {"command": ["sh", "-c", "echo no such model; exit 3"]},
    }
    with launched(write_roles(tmp_path, roles)) as launch:
        assert launch.wait() == 1
    assert "judge-0 must stay up, got 5 ends one after the other, the last one with exit code 3" in launch.printed
    assert "no such model" in launch.printed.splitlines()[-1]
    assert (launch.run / "learner.left").exists()


def test_what_a_role_started_in_a_session_of_its_own_ends_with_it(tmp_path: Path) -> None:
    child = "import time\ntime.sleep(600)"
    roles = {
        "learner": {"command": words(ENDS_WHEN_THERE_IS_A_FILE, "learner")},
        "engine": {"command": words(OUTSIDE.format(child=child) + STAYS, "engine-{index}")},
    }
    with launched(write_roles(tmp_path, roles)) as launch:
        run = launch.run
        until(lambda: len(left_over(run)) == 3 and bool(starts(run, "engine-0")), launch.printed)
        os.kill(starts(run, "engine-0")[0], signal.SIGKILL)
        until(lambda: len(starts(run, "engine-0")) == 2, launch.printed)
        until(lambda: len(left_over(run)) == 3, launch.printed)
        (run / "end").touch()
        assert launch.wait() == 0
    assert left_over(run) == []


def test_a_role_that_does_not_leave_is_killed(tmp_path: Path) -> None:
    deaf = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf')\ntime.sleep(600)"
    roles = {
        "learner": {"command": words(ENDS_WHEN_THERE_IS_A_FILE, "learner")},
        "worker": {"command": [sys.executable, "-c", deaf], "stop_s": 0.5},
    }
    with launched(write_roles(tmp_path, roles)) as launch:
        until(lambda: "| deaf" in launch.printed, launch.printed)
        (launch.run / "end").touch()
        assert launch.wait() == 0
    assert "worker-0 | [did not leave within 0.5 s and is killed]" in launch.printed
    assert left_over(launch.run) == []


def test_each_launch_has_a_run_of_its_own_and_resume_goes_on_with_one(tmp_path: Path) -> None:
    begins = [sys.executable, "-c", BEGINS, "{run}", str(tmp_path / "config.yaml")]
    file = write_roles(tmp_path, {"learner": {"command": begins}})
    for options in ((), (), ("--resume",), ("--resume", "auto"), ("--run", str(tmp_path / "runs" / "small-001"))):
        with launched(file, *options) as launch:
            assert launch.wait() == 0, launch.printed
    places = [line for line in launch.printed.splitlines() if line.startswith("run folder")]
    assert [line.rpartition("-")[2] for line in places] == ["001", "002", "002", "002", "001"]


def test_no_role_of_a_run_is_launched_twice_at_once(tmp_path: Path) -> None:
    file = three_roles(tmp_path)
    with launched(file) as first:
        until(lambda: all(starts(first.run, name) for name in NAMES), first.printed)
        with launched(file, "--run", str(first.run)) as second:
            assert second.wait() == 2
        assert "--run must name a run whose learner nobody else launches" in second.printed
        assert all(len(starts(first.run, name)) == 1 for name in NAMES)
        first.send(signal.SIGTERM)
        assert first.wait() == 143


def test_one_role_can_be_launched_alone_and_its_leaving_ends_that(tmp_path: Path) -> None:
    file = write_roles(tmp_path, {"worker": {"count": 2, "command": ["sh", "-c", "echo index {index}"]}})
    with launched(file, "--run", str(tmp_path / "runs" / "small-001"), "--only", "worker-1") as launch:
        assert launch.wait() == 0
    assert "worker-1 | index 1" in launch.printed
    assert "index 0" not in launch.printed


def test_gpus_are_given_once_each_in_order() -> None:
    members = [
        RoleMember("engine", "engine-0", ("x",), EngineRole(gpus=2)),
        RoleMember("engine", "engine-1", ("x",), EngineRole(gpus=1)),
        RoleMember("worker", "worker-0", ("x",), WorkerRole()),
    ]
    assert assigned_devices(members, {"CUDA_VISIBLE_DEVICES": "4,5,7"}) == {
        "engine-0": {"CUDA_VISIBLE_DEVICES": "4,5"},
        "engine-1": {"CUDA_VISIBLE_DEVICES": "7"},
        "worker-0": {"CUDA_VISIBLE_DEVICES": ""},
    }
    with pytest.raises(UserError, match=r"roles must fit this machine's 1 GPUs, got 3 \(engine-0 2, engine-1 1\)"):
        assigned_devices(members, {"CUDA_VISIBLE_DEVICES": "0"})
    assert assigned_devices(members[2:], {}) == {}
