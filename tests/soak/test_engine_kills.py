"""A run goes on while the engine that it samples from is killed and stopped again and again."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.runs import ROOT, rows
from tests.soak.test_engine_refusals import engine_command, signal_worker
from tests.soak.test_quickstart import evaluations, quickstart, warmed_up_model, worst_log_prob_error
from tests.vllm.environment import missing
from tests.vllm.server import KEY, free_port

pytestmark = [pytest.mark.soak, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
FAULTS = [signal.SIGKILL] * 10 + [signal.SIGSTOP] * 3
ITERATIONS = 14
SHORT = (f"run.iterations={ITERATIONS}", "run.stop_at_success=null", "evaluation.tasks=128", "context.max_tokens=1024")


def test_a_run_outlives_ten_kills_and_three_stops_of_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTLOOP_ENGINE_KEY", KEY)
    model, port = warmed_up_model(tmp_path / "warm-up"), free_port()
    training = _train(tmp_path, model, port)
    run = tmp_path / "runs" / "quickstart-001"
    try:
        _until(run.is_dir, training)
        with engine_command(model, run, port, "--silence", "15") as (_, lines):
            sent = _send_faults(port, lines, training)
            _until(lambda: training.poll() is not None, training, limit_s=1800)
    finally:
        training.kill()
        training.wait()
    assert training.returncode == 0, (tmp_path / "output.txt").read_text()
    undisturbed = Path(str(quickstart(tmp_path / "undisturbed", f"model.path={model}", *SHORT)["folder"]))
    success, without = evaluations(run)[-1], evaluations(undisturbed)[-1]
    failed = rows(run / "replay.sqlite", "select count(*) from trajectories where stop_reason = 'engine_failure'")
    starts = lines().count("answers at")
    print(f"{sent} faults, {starts} starts, {failed[0][0]} episodes failed; success {success:.1%}, else {without:.1%}")
    assert sent == len(FAULTS) and starts >= len(FAULTS)
    assert success >= without - 0.15
    # Every stored token is of the version that its row names.
    assert worst_log_prob_error(run) < 1e-3


def _train(folder: Path, model: Path, port: int) -> subprocess.Popen[bytes]:
    settings = (
        *(f"run.folder={folder / 'runs'}", f"model.path={model}", "rollout.engine=vllm", *SHORT),
        *(f'engine.urls=["http://127.0.0.1:{port}"]', "engine.served_model_name=policy"),
        *("engine.turn_timeout_s=600", "engine.restart_timeout_s=600"),
    )
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [Path(sys.executable).with_name("agentloop"), "train", "configs/quickstart.yaml", *sets]
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)


def _send_faults(port: int, lines: Callable[[], str], training: subprocess.Popen[bytes]) -> int:
    """Each some seconds after the engine serves again; how many were sent."""
    chance = random.Random(0)
    faults = chance.sample(FAULTS, len(FAULTS))
    served = 0
    for number, fault in enumerate(faults):
        _until(lambda least=served: lines().count("serves policy") > least, training)
        time.sleep(chance.uniform(1, 12))
        if training.poll() is not None:
            return number
        signal_worker(port, fault)
        served = lines().count("serves policy")
    return len(FAULTS)


def _until(holds: Callable[[], bool], training: subprocess.Popen[bytes], *, limit_s: float = 600) -> None:
    end = time.monotonic() + limit_s
    while not holds() and training.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.5)
