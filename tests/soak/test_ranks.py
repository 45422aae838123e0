"""torchrun, as people start it: a killed rank costs no more than its time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from agentloop.runs.run_folder import complete_checkpoints
from tests.fakes.processes import assert_sound, write_config
from tests.fakes.runs import ROOT, small_config

pytestmark = pytest.mark.soak

ITERATIONS = 12


def torchrun(*command: str | Path) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    words, piped = [*launcher, "-m", "agentloop", "train", *map(str, command)], subprocess.PIPE
    return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=piped, stderr=subprocess.STDOUT, text=True)


def rank(launched: subprocess.Popen[str], number: int) -> psutil.Process:
    workers = psutil.Process(launched.pid).children(recursive=True)
    return next(worker for worker in workers if worker.environ().get("RANK") == str(number))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_ends_the_others_and_resume_goes_on(tmp_path: Path, qwen2: Path, lost: int) -> None:
    config = small_config(tmp_path / "runs", qwen2, run={"iterations": 4 * ITERATIONS}, compute={"rank_timeout_s": 20})
    file = write_config(config, tmp_path / "small.yaml")
    run = tmp_path / "runs" / "small-001"
    launched = torchrun(file)
    while not (run / "checkpoints" / "000004" / "COMPLETE").exists():
        assert launched.poll() is None, launched.communicate()
        time.sleep(0.02)
    other = rank(launched, 1 - lost)
    rank(launched, lost).send_signal(signal.SIGKILL)
    began = time.monotonic()
    said, _ = launched.communicate(timeout=120)
    assert time.monotonic() - began < 60
    assert launched.returncode != 0
    assert not other.is_running()
    assert "every rank must stay alive and answer within compute.rank_timeout_s" in said, said
    reached = int(complete_checkpoints(run / "checkpoints")[-1].name)

    resumed = torchrun(file, "--resume")
    said, _ = resumed.communicate(timeout=600)
    assert resumed.returncode == 0, said
    assert f"resumed {run} after iteration {reached}" in said
    assert_sound(run, iterations=4 * ITERATIONS)
