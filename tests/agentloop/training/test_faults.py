"""What goes wrong around a run: kills, signals, full and read-only disks, bad numbers, bad sinks, bad tools."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentloop.cli.main import main
from agentloop.config import RunConfig
from agentloop.distributed.tensor_files import read_tensors
from agentloop.errors import UserError
from agentloop.runs.checkpoint import load_checkpoint
from agentloop.runs.run_folder import RunFolder, complete_checkpoints
from agentloop.training.train import train
from agentloop.user_code import load_class
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.processes import Moments, Training, assert_same_run, assert_sound, write_config
from tests.fakes.runs import ROOT, SilentDisplay, rows, save_qwen2, small_config

pytestmark = pytest.mark.slow

MOODY = f"{ENVIRONMENTS / 'parity.py'}:Moody"
ITERATIONS = 6
EVERY = 2


def config_in(folder: Path, model: Path, **sections: dict[str, Any]) -> RunConfig:
    defaults: dict[str, dict[str, Any]] = {
        "run": {"iterations": ITERATIONS},
        "environment": {"name": MOODY},
        "checkpoint": {"every": EVERY},
    }
    return small_config(folder, model, **{**defaults, **sections})


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> Path:
    return train(config_in(tmp_path_factory.mktemp("unbroken"), qwen2), display=SilentDisplay()).folder


FrontDoor = Callable[..., tuple[int, str]]


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> FrontDoor:
    """`agentloop train` on a configuration, in this process: its exit code and what it wrote to stderr."""

    def run(config: RunConfig, *options: str) -> tuple[int, str]:
        file = write_config(config, tmp_path / "config.yaml")
        monkeypatch.setattr(sys, "argv", ["agentloop", "train", str(file), *options])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        lines = [one for one in capfd.readouterr().err.splitlines() if one.startswith("agentloop") or "Trace" in one]
        assert len(lines) <= 1
        return int(ended.value.code or 0), "".join(lines)

    return run


# kill -9


def test_killed_run_ends_like_the_unbroken_one(tmp_path: Path, qwen2: Path, unbroken: Path) -> None:
    config = config_in(tmp_path / "runs", qwen2)
    moments = Moments(tmp_path / "runs" / "small-001", every=EVERY)
    training = Training(write_config(config, tmp_path / "config.yaml"))
    training.says("iteration")
    assert training.kill_when(moments.committed_unpublished), training.errors
    assert moments.committed - moments.saved <= EVERY
    assert train(config, resume=True, display=SilentDisplay()).exit_code == 0
    assert_sound(moments.folder, iterations=ITERATIONS)
    assert_same_run(moments.folder, unbroken)
    assert moments.number("select count(*) from trajectories where state = 'orphaned'") >= 12  # an iteration's fresh


def test_start_killed_before_it_had_a_name_does_not_stop_the_next(tmp_path: Path, qwen2: Path) -> None:
    (tmp_path / "small-001").mkdir()
    config = config_in(tmp_path, qwen2, run={"iterations": 1})
    with pytest.raises(UserError, match=r"--resume \(in Python resume=True\) must find a run named 'small'"):
        train(config, resume=True, display=SilentDisplay())
    assert train(config, display=SilentDisplay()).folder.name == "small-002"


def test_lock_is_not_held_by_what_a_killed_trainer_has_forked(tmp_path: Path) -> None:
    holder = """
import os, signal, sys, time
from pathlib import Path
from agentloop.config import RunConfig
from agentloop.runs.run_folder import RunFolder
lock = RunFolder(Path(sys.argv[1]), "id", RunConfig()).lock()
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(30)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", holder, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    child = int(done.stdout)
    try:
        assert done.returncode == -signal.SIGKILL
        with RunFolder(tmp_path, "id", RunConfig()).lock():
            pass
    finally:
        os.kill(child, signal.SIGKILL)


# disks


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Callable[..., None]]:
    """A file system of its own on `folder`; what it yields changes its mount options."""
    folder.mkdir()

    def mount(options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True).returncode == 0

    if not mount(f"size={kilobytes}k"):
        pytest.skip("needs the right to mount a small file system")

    def change(options: str) -> None:
        assert mount(f"remount,{options}")

    try:
        yield change
    finally:
        gc.collect()  # what a failed start had open goes with its exception
        subprocess.run(["umount", str(folder)], check=True)


def check_refused(door: FrontDoor, config: RunConfig, options: list[str], rule: str) -> None:
    code, line = door(config, *options)
    assert code == 2
    assert rule in line and f" at {config.run.folder}" in line and "bytes free)" in line


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_full_disk_loses_nothing(door: FrontDoor, tmp_path: Path, qwen2: Path, unbroken: Path, share: float) -> None:
    """With room again the run ends as if nothing had happened."""
    needed = sum(path.stat().st_size for path in unbroken.rglob("*")) // 1024
    with small_disk(tmp_path / "disk", int(needed * share)) as change:
        config = config_in(tmp_path / "disk", qwen2)
        check_refused(door, config, [], "agentloop: ")
        run = tmp_path / "disk" / "small-001"
        for checkpoint in complete_checkpoints(run / "checkpoints"):
            load_checkpoint(checkpoint)
        again = ["--resume"] if (run / "run.json").exists() else []
        change("ro")
        for options in ([], again):
            check_refused(door, config, options, "run.folder must be writable, got Read-only file system")
        change("rw,size=1g")
        assert door(config, *again) == (0, "")
        run = max((tmp_path / "disk").glob("small-*"))
        assert_sound(run, iterations=ITERATIONS)
        assert_same_run(run, unbroken)


# numbers


def test_nan_gradient_stops_the_run_with_one_line(door: FrontDoor, tmp_path: Path, qwen2: Path) -> None:
    code, line = door(config_in(tmp_path / "runs", qwen2, optimizer={"learning_rate": 1e30}))
    assert code == 1
    assert line.startswith("agentloop: training stopped: loss and gradient must be finite, got loss nan")
    run = tmp_path / "runs" / "small-001"
    # The first of its two steps was applied in memory; nothing of the iteration is in a checkpoint.
    assert [path.name for path in complete_checkpoints(run / "checkpoints")] == ["000000"]
    assert not [name for name in read_tensors(run / "checkpoints" / "000000" / "state") if "exp_avg" in name]
    assert rows(run / "replay.sqlite", "select iteration, value from metrics where name = 'run/stopped'") == [(1, 1.0)]
    assert (run / "report.html").exists()


def test_weights_that_are_no_numbers_are_refused_by_name(door: FrontDoor, tmp_path: Path, qwen2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen2)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    bad = save_qwen2(tmp_path / "bad")
    model.save_pretrained(bad)
    code, line = door(config_in(tmp_path / "runs", bad))
    assert (code, line) == (
        1,
        "agentloop: training stopped: log-probs of the policy must be numbers, got NaN from policy version 0. "
        "Its weights are NaN or too large: lower optimizer.learning_rate, or check the files of the model.",
    )


@pytest.mark.parametrize(
    ("mood", "said"),
    [
        ("nan", "reward must return a finite number, got nan"),
        ("raise", "reward must return a number, got ConnectionError: no answer at parity.py:84"),
        ("stuck", "start must accept its tasks, got ConnectionError: no answer at parity.py:68"),
    ],
)
def test_bad_environment_stops_the_run_and_resume_continues_once_it_is_mended(
    door: FrontDoor, tmp_path: Path, qwen2: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch, mood: str, said: str
) -> None:
    config = config_in(tmp_path / "runs", qwen2)
    load_class(config.environment.name, what="environment.name").asked = 0  # type: ignore[attr-defined]
    monkeypatch.setenv("AGENTLOOP_TEST_MOOD", mood)
    code, line = door(config)
    assert code == 2
    assert line.startswith(f"agentloop: Moody.{said} for the task 'Say something of even length, number ")
    run = tmp_path / "runs" / "small-001"
    assert f"Mend it. Then go on: agentloop train {run} --resume, with --environment-changed too if a file of" in line
    ((learned, stored),) = rows(
        run / "replay.sqlite", "select sum(fresh), (select count(*) from trajectories) from iterations"
    )
    assert learned == stored > 0
    monkeypatch.delenv("AGENTLOOP_TEST_MOOD")
    assert door(config, "--resume") == (0, "")
    assert_same_run(run, unbroken)
