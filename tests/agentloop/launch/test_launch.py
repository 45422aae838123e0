"""Roles on this machine: what dies comes back, and everything leaves with the learner."""

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agentloop.launch.supervised_role import Restarts
from tests.docs.blocks import blocks
from tests.fakes.launched import ENDS_WHEN_THERE_IS_A_FILE, NAMES, STAYS, Launch, left_over, starts, words, write_roles
from tests.fakes.processes import until

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


@pytest.mark.slow
def test_each_role_comes_back_after_kill_9_and_all_leave_when_the_learner_has_ended(tmp_path: Path) -> None:
    with Launch(write_roles(tmp_path)) as launch:
        run = launch.run
        until(lambda: all(starts(run, name) for name in NAMES), lambda: launch.output)
        for name in NAMES:
            os.kill(starts(run, name)[-1], signal.SIGKILL)
        until(lambda: all(len(starts(run, name)) == 2 for name in NAMES), lambda: launch.output)
        (run / "end").touch()
        assert launch.wait() == 0, launch.output
    assert all((run / f"{name}.left").read_text() == "asked" for name in NAMES[1:])
    assert left_over(run) == []
    assert "worker-1 | worker-1 is up" in launch.output
    assert "learner  | [has died with signal 9; started again in 1 s]" in launch.output
    logged = [json.loads(line) for line in (run / "logs" / "engine-0.jsonl").read_text().splitlines()]
    assert {(entry["role"], datetime.fromisoformat(entry["time"]).tzinfo) for entry in logged} == {("engine-0", UTC)}
    assert [entry["pid"] for entry in logged if entry["event"] == "started"] == starts(run, "engine-0")
    assert [entry["text"] for entry in logged if entry["event"] == "printed"] == ["engine-0 is up"] * 2
    assert any("has died with signal 9" in entry["text"] for entry in logged if entry["event"] == "supervised")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.slow
def test_one_signal_makes_every_role_leave_and_nothing_stays(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with Launch(write_roles(tmp_path)) as launch:
        run = launch.run
        until(lambda: all((run / "logs" / f"{name}.jsonl").exists() and starts(run, name) for name in NAMES))
        until(lambda: launch.output.count("is up") == len(NAMES), lambda: launch.output)
        launch.send(number)
        assert launch.wait() == code, launch.output
    assert all((run / f"{name}.left").exists() for name in NAMES)
    assert left_over(run) == []


@pytest.mark.slow
def test_learner_with_an_error_to_mend_ends_the_launch_with_its_code(tmp_path: Path) -> None:
    roles = {
        "learner": {"command": ["sh", "-c", "echo loss must be one of them; sleep 1; exit 2"]},
        "worker": {"command": words(STAYS, "worker-{index}")},
    }
    with Launch(write_roles(tmp_path, roles)) as launch:
        assert launch.wait() == 2
    assert "learner must not fail, got exit code 2: loss must be one of them" in launch.output
    assert left_over(launch.run) == []


def test_a_role_is_started_again_after_longer_and_longer_and_then_no_more() -> None:
    ends, refusals = Restarts(), Restarts()
    assert [ends.next_wait_s(1, ran_s=0.1) for _ in range(3)] == [1.0, 2.0, 4.0]
    assert [ends.next_wait_s(-9, ran_s=90.0) for _ in range(9)] == [1.0] * 9
    assert [ends.next_wait_s(1, ran_s=0.1) for _ in range(4)] == [2.0, 4.0, 8.0, None]
    assert [refusals.next_wait_s(2, ran_s=90.0) for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, None]


@pytest.mark.soak
def test_a_role_that_does_not_stay_up_ends_the_launch_with_its_last_lines(tmp_path: Path) -> None:
    fails = ["sh", "-c", "echo no such model; exit 3"]
    roles = {"learner": {"command": words(STAYS, "learner")}, "judge": {"command": fails}}
    with Launch(write_roles(tmp_path, roles)) as launch:
        assert launch.wait() == 1
    assert "judge-0 must stay up, got 5 ends one after the other, the last one with exit code 3" in launch.output
    assert "no such model" in launch.output.splitlines()[-1]
    assert (launch.run / "learner.left").exists()


@pytest.mark.slow
def test_processes_of_a_role_end_with_it_and_a_role_that_stays_is_killed(tmp_path: Path) -> None:
    child = "import time\ntime.sleep(600)"
    deaf = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf')\ntime.sleep(600)"
    roles = {
        "learner": {"command": words(ENDS_WHEN_THERE_IS_A_FILE, "learner")},
        "engine": {"command": words(OUTSIDE.format(child=child) + STAYS, "engine-{index}")},
        "worker": {"command": [sys.executable, "-c", deaf], "stop_s": 0.5},
    }
    with Launch(write_roles(tmp_path, roles)) as launch:
        run = launch.run
        until(lambda: len(left_over(run)) == 4 and bool(starts(run, "engine-0")), lambda: launch.output)
        os.kill(starts(run, "engine-0")[0], signal.SIGKILL)
        until(lambda: len(starts(run, "engine-0")) == 2, lambda: launch.output)
        until(lambda: len(left_over(run)) == 4 and "| deaf" in launch.output, lambda: launch.output)
        (run / "end").touch()
        assert launch.wait() == 0
    assert "worker-0 | [did not leave within 0.5 s and is killed]" in launch.output
    assert left_over(run) == []


@pytest.mark.slow
def test_each_launch_has_a_run_of_its_own_that_resume_goes_on_with(tmp_path: Path) -> None:
    begins = [sys.executable, "-c", BEGINS, "{run}", str(tmp_path / "config.yaml")]
    worker = {"count": 2, "command": ["sh", "-c", "echo index {index}"]}
    file = write_roles(tmp_path, {"learner": {"command": begins}, "worker": worker})
    places = list[str]()
    for options in ((), (), ("--resume", "auto")):
        with Launch(file, *options) as launch:
            assert launch.wait() == 0, launch.output
            places.append(launch.run.name)
    assert places == ["small-001", "small-002", "small-002"]


@pytest.mark.slow
def test_a_slurm_job_is_queued_again_when_its_time_was_up_and_goes_on_with_its_run(tmp_path: Path) -> None:
    """The recipe of docs/scaling.md, with stand-ins for `agentloop launch` and `scontrol`."""
    (recipe,) = [block.text for block in blocks() if "#SBATCH" in block.text]
    asked, ended = tmp_path / "asked", tmp_path / "ended"
    programs = {
        "agentloop": f"trap 'sleep 0.1; exit 143' TERM; touch {asked}; [ -e {ended} ] || while :; do sleep 0.05; done",
        "scontrol": f'echo "$@" >> {tmp_path / "queued"}',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    place = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(["bash", "-c", recipe], env=place)
    until(asked.exists)
    job.send_signal(signal.SIGTERM)
    assert (job.wait(), (tmp_path / "queued").read_text()) == (143, "requeue 7\n")
    ended.touch()
    assert subprocess.run(["bash", "-c", recipe], env=place).returncode == 0
    assert (tmp_path / "queued").read_text() == "requeue 7\n"
