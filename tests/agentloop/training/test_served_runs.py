"""Runs that start an engine of their own: it is there when they sample, and gone when they are, however they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentloop import train
from agentloop.config import RunConfig
from agentloop.config.config_file import to_plain
from agentloop.engines.publish.proof import PROOFS
from agentloop.engines.serving.served_engine import EngineEnded, serve_options
from agentloop.engines.serving.vllm_command import ServeOptions
from agentloop.errors import UserError
from agentloop.runs.run_folder import COMPLETE, has_run
from tests.fakes.published_policies import by_value
from tests.fakes.run_roles import AGENTLOOP, engine_executable
from tests.fakes.runs import ROOT, SilentDisplay, buffer_of, rows, save_qwen2, small_config

pytestmark = pytest.mark.slow

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    program = engine_executable(tmp_path / "bin")
    monkeypatch.setenv("AGENTLOOP_VLLM", str(program))
    return program


def config(folder: Path, model: Path, **sections: dict[str, Any]) -> RunConfig:
    given = {"rollout": {"engine": "vllm"}, "engine": {"serve": True}, "checkpoint": {"every": 10}, **sections}
    given["run"] = {"name": "small", "folder": str(folder / "runs"), "iterations": 2, "seed": 0}
    return small_config(folder, model, **given)


def engine_logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("runs/*/engine-*.log"), key=lambda path: path.stat().st_mtime)


def processes(folder: Path) -> list[int]:
    """All that were started for the engines of the runs in `folder`, by their words."""
    wanted = [log.stem.rpartition("-")[2] for log in engine_logs(folder)]
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_text().split("\0")
            if "--port" in words and words[words.index("--port") + 1] in wanted:
                found.append(int(path.parent.name))
    return found


def calls(log: Path) -> list[str]:
    """What its control was asked, in this order."""
    paths = re.findall(r'"POST /(\S+) HTTP', log.read_text())
    return [path for path in paths if not path.startswith(("inference/", "tokenize", "v1/completions"))]


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_run_starts_its_engine_and_ends_it(tmp_path: Path, model: Path) -> None:
    display = SilentDisplay()
    result = train(config(tmp_path, model), display=display)
    (log,) = engine_logs(tmp_path)
    assert log.parent == result.folder
    assert f"starting vllm serve {model} (log: {log})" in display.notes
    assert processes(tmp_path) == []
    stored = rows(buffer_of(result.folder), "select distinct iteration, policy_version_min from trajectories")
    assert sorted(stored) == [(1, 0), (2, 1)]
    one_publish = ["pause?mode=keep", "collective_rpc", "reset_prefix_cache?reset_running_requests=true"]
    assert calls(log) == [*one_publish, "update_weight_version", "resume"] * 3
    for metrics in display.iterations:
        parts = [metrics[f"time/publish_{part}"] for part in ("probe", "write", "load", "prove")]
        assert 0 < sum(parts) <= metrics["time/publish"]
        assert "time/sleep" not in metrics and "time/wake" not in metrics


def test_an_engine_on_the_learners_gpu_sleeps_from_the_last_episode_to_the_next_weights(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but that handles of memory hold the numbers. What the test server discards is other numbers then."""
    monkeypatch.setattr("agentloop.training.components.serve_options", as_on_a_gpu)
    monkeypatch.setattr("agentloop.training.policies.engine_publisher.shared_weights", by_value)
    display = SilentDisplay()
    result = train(config(tmp_path, model, checkpoint={"keep_policies": "none"}), display=display)
    (log,) = engine_logs(tmp_path)
    receive = ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
    load = ["pause?mode=keep", *receive]
    named = ["reset_prefix_cache?reset_running_requests=true", "update_weight_version", "resume"]
    sleep = ["sleep?level=2&mode=abort", "update_weight_version"]
    again = [*sleep, "wake_up?tags=weights", *load, "wake_up?tags=kv_cache", *named]
    assert calls(log) == [*load, *named, *again, *again]
    for metrics in display.iterations:
        assert "time/publish_write" not in metrics
        assert 0 < metrics["time/wake"] <= metrics["time/publish_load"]
        assert metrics["time/sleep"] > 0
    assert [path.name for path in (result.folder / "policies").iterdir() if path.is_dir()] == []
    proofs = (result.folder / "policies" / PROOFS).read_text().splitlines()
    assert [json.loads(line)["holds"] for line in proofs] == [True] * 3


def as_on_a_gpu(config: RunConfig, first: Path | str, *, shares_gpu: bool) -> ServeOptions:
    return serve_options(config, first, shares_gpu=True)


def test_a_start_that_fails_is_one_line_that_names_the_log_and_leaves_no_run(
    tmp_path: Path, model: Path, executable: Path
) -> None:
    executable.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 0.32.0 && exit\necho "OSError: no such GPU"; exit 3\n'
    )
    with pytest.raises(UserError) as refused:
        train(config(tmp_path, model), display=SilentDisplay())
    (log,) = engine_logs(tmp_path)
    assert str(refused.value) == (f"vllm serve must start, got exit code 3: OSError: no such GPU All of it: {log}")
    assert not has_run(log.parent)
    assert [path.name for path in log.parent.iterdir()] == [log.name]


def test_a_vllm_that_is_not_there_is_refused_before_it_is_started(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTLOOP_VLLM", "/nowhere/vllm")
    with pytest.raises(UserError, match="AGENTLOOP_VLLM must be vLLM's own executable, got '/nowhere/vllm'"):
        train(config(tmp_path, model), display=SilentDisplay())
    assert list(tmp_path.glob("runs/*")) == []


class KillsTheEngine(SilentDisplay):
    """In a phase of the second iteration."""

    def __init__(self, folder: Path, phase: str) -> None:
        super().__init__()
        self._folder, self._phase = folder, phase

    def phase(self, name: str, done: int, total: int) -> None:
        if name == self._phase and len(self.iterations) == 1:
            for pid in processes(self._folder):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("phase", "learned"), [("collect", 1), ("update", 2)])
def test_a_run_whose_engine_dies_keeps_what_it_learned_and_goes_on_with_another(
    tmp_path: Path, model: Path, phase: str, learned: int
) -> None:
    given = config(tmp_path, model)
    with pytest.raises(EngineEnded, match=r"must stay up, got exit code -9: .* What it says: .*/engine-\d+.log"):
        train(given, display=KillsTheEngine(tmp_path, phase))
    (run,) = tmp_path.glob("runs/*")
    assert (run / "checkpoints" / f"{learned:06d}" / COMPLETE).exists()
    resumed = train(given, display=SilentDisplay(), resume=True)
    stored = rows(buffer_of(resumed.folder), "select distinct iteration, policy_version_min from trajectories")
    assert sorted(stored) == [(1, 0), (2, 1)]
    assert len(engine_logs(tmp_path)) == 2 and processes(tmp_path) == []


@pytest.mark.soak
@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGINT])
def test_an_engine_ends_with_a_run_that_ends_at_once(tmp_path: Path, model: Path, ended_by: signal.Signals) -> None:
    """Killed, or asked to stop before there is anything to finish: its engine has just been started."""
    given = tmp_path / "config.yaml"
    given.write_text(yaml.safe_dump(to_plain(config(tmp_path, model))))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    training = subprocess.Popen([AGENTLOOP, "train", str(given)], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(processes(tmp_path)) >= 2)
        training.send_signal(ended_by)
        training.wait(LIMIT_S)
        until(lambda: processes(tmp_path) == [])
    finally:
        training.kill()
        training.wait()
