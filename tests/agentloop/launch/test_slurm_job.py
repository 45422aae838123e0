"""The Slurm job: what it asks for, and that it goes on with its run when it is queued again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from agentloop.errors import UserError
from agentloop.launch.role_commands import RoleMember
from agentloop.launch.roles_file import EngineRole, LearnerRole, WorkerRole
from agentloop.launch.slurm_job import slurm_script
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
from tests.fakes.slurm_programs import install

MEMBERS = [
    RoleMember("learner", "learner", ("x",), LearnerRole(cpus=4, gpus=1, stop_s=100)),
    RoleMember("engine", "engine-0", ("x",), EngineRole(cpus=2, gpus=2)),
    RoleMember("worker", "worker-0", ("x",), WorkerRole()),
]


def test_the_job_has_room_for_all_roles_and_time_for_them_to_leave(tmp_path: Path) -> None:
    script = slurm_script(Path("a b.yaml"), MEMBERS, Path("runs/x-001"), ["--time=1:00:00"])
    assert script.splitlines()[:10] == [
        "#!/bin/bash",
        "#SBATCH --job-name=x-001",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks=1",
        "#SBATCH --cpus-per-task=7",
        "#SBATCH --gres=gpu:3",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:TERM@160",
        "#SBATCH --time=1:00:00",
    ]
    assert f"launch '{Path.cwd()}/a b.yaml' --run {Path.cwd()}/runs/x-001 &" in script
    (tmp_path / "job.sh").write_text(script)
    assert subprocess.run(["bash", "-n", str(tmp_path / "job.sh")], capture_output=True, check=True).stderr == b""
    with pytest.raises(UserError, match="slurm.options must each be one line"):
        slurm_script(Path("a"), MEMBERS, Path("x"), ["--a\nrm -r ."])


def test_a_job_whose_time_is_up_twice_goes_on_with_its_run_to_the_end(tmp_path: Path) -> None:
    programs = install(tmp_path / "programs", limits=2)
    roles = {
        "learner": {"command": words(ENDS_WHEN_THERE_IS_A_FILE, "learner")},
        "worker": {"count": 2, "command": words(STAYS, "worker-{index}")},
    }
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    with launched(write_roles(tmp_path, roles), "--on", "slurm", environment=path) as launch:
        run = tmp_path / "runs" / "small-001"
        output = programs / "job.out"
        for start in range(3):
            until(lambda: all(len(starts(run, f"worker-{i}")) == start + 1 for i in (0, 1)), launch.printed)  # noqa: B023
            until(lambda: output.read_text().count("learner is up") == start + 1, launch.printed)  # noqa: B023
            (run / "end" if start == 2 else programs / f"limit-{start}").touch()
        assert launch.wait() == 0, launch.printed
    assert (programs / "codes").read_text().split() == ["143", "143", "0"]
    assert [len(starts(run, name)) for name in ("learner", "worker-0", "worker-1")] == [3, 3, 3]
    assert left_over(run) == []
    assert f"Submitted batch job 7 ({run / 'logs' / 'slurm.sh'})" in launch.printed


def test_a_job_that_the_user_must_mend_is_not_queued_again(tmp_path: Path) -> None:
    programs = install(tmp_path / "programs", limits=2)
    roles = {"learner": {"command": ["sh", "-c", "echo no such model; exit 2"]}}
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    with launched(write_roles(tmp_path, roles), "--on", "slurm", environment=path) as launch:
        assert launch.wait() == 0
    assert (programs / "codes").read_text().split() == ["2"]


def test_a_dry_run_prints_the_script_and_makes_nothing(tmp_path: Path) -> None:
    file = write_roles(tmp_path, {})
    with launched(file, "--on", "slurm", "--dry-run") as launch:
        assert launch.wait() == 0
    assert launch.printed.startswith("#!/bin/bash\n#SBATCH --job-name=small-001\n")
    assert not (tmp_path / "runs").exists()


def test_without_sbatch_the_script_stays_to_be_submitted(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with launched(write_roles(tmp_path, {}), "--on", "slurm", environment={"PATH": str(empty)}) as launch:
        assert launch.wait() == 2
    assert (
        f"got none. Where there is one: sbatch {tmp_path / 'runs' / 'small-001' / 'logs' / 'slurm.sh'}"
        in launch.printed
    )
