"""torchrun, as people start it: two ranks learn what one does, and a killed rank costs no more than its time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from agentloop.runs.run_folder import complete_checkpoints
from agentloop.training.train import train
from tests.fakes.processes import assert_sound, write_config
from tests.fakes.runs import ROOT, SilentDisplay, buffer_of, rows, small_config

pytestmark = pytest.mark.soak

ITERATIONS = 12
COMPOSITION = """select d.iteration, d.slot, d.stream, d.staleness, t.iteration, t.slot, t.task, {said}
                 from draws d join trajectories t on t.id = d.trajectory where d.iteration <= {last}
                 order by d.iteration, d.slot"""
SAMPLED = "t.num_tokens, t.reward, t.num_turns"
LOSSES = """select iteration, name, value from metrics where name like 'actor/%/pg_loss' and iteration <= {last}
            order by iteration, name"""
ALIKE = 3
"""Iterations in which rounding has not yet led to another token."""


def torchrun(*command: str | Path) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    words, piped = [*launcher, "-m", "agentloop", "train", *map(str, command)], subprocess.PIPE
    return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=piped, stderr=subprocess.STDOUT, text=True)


def rank(launched: subprocess.Popen[str], number: int) -> psutil.Process:
    workers = psutil.Process(launched.pid).children(recursive=True)
    return next(worker for worker in workers if worker.environ().get("RANK") == str(number))


def test_two_ranks_make_the_run_of_one(tmp_path: Path, qwen2: Path) -> None:
    one = small_config(tmp_path / "one", qwen2, run={"iterations": ITERATIONS})
    alone = train(one, display=SilentDisplay()).folder
    two = small_config(tmp_path / "two", qwen2, run={"iterations": ITERATIONS})
    launched = torchrun(write_config(two, tmp_path / "two.yaml"))
    said, _ = launched.communicate(timeout=600)
    assert launched.returncode == 0, said
    together = tmp_path / "two" / "small-001"
    assert_sound(together, iterations=ITERATIONS)
    for said, last in (("''", ITERATIONS), (SAMPLED, ALIKE)):
        query = COMPOSITION.format(said=said, last=last)
        assert rows(buffer_of(together), query) == rows(buffer_of(alone), query)
    losses = LOSSES.format(last=ALIKE)
    for ours, theirs in zip(rows(buffer_of(together), losses), rows(buffer_of(alone), losses), strict=True):
        assert ours[:2] == theirs[:2]
        assert ours[2] == pytest.approx(theirs[2], abs=1e-5)
    # Every weight has moved, and to where one rank moves it; AdamW's first steps carry rounding on.
    first, ours, theirs = (
        load_file(run / "policies" / version / "model.safetensors")
        for run, version in ((alone, "000000"), (together, "000001"), (alone, "000001"))
    )
    for name, weight in ours.items():
        assert not torch.equal(weight, first[name]), name
        torch.testing.assert_close(weight, theirs[name], atol=1e-4, rtol=0)
    assert (together / "report.html").exists()


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
