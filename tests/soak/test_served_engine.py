"""A run with a real vLLM of its own: killed, it leaves no process; resumed, it learns with another. And one sleeps."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest
import yaml

from agentloop.config.config_file import to_plain
from agentloop.engines.publish.engine_control import ASLEEP
from agentloop.engines.publish.proof import PROOFS, publish
from tests.fakes.processes import AGENTLOOP
from tests.fakes.published_policies import published, step, tiny_learner
from tests.fakes.runs import ROOT, rows, save_vllm_llama, small_config
from tests.vllm.environment import EXECUTABLE, missing
from tests.vllm.server import KEY, SMALL, SMALL_MACHINE, START_S, real_engine

pytestmark = [pytest.mark.soak, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
ITERATIONS = 6


@pytest.mark.timeout(3600)
def test_a_run_that_was_killed_leaves_no_engine_and_goes_on_with_another(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "small-001"
    training = train(tmp_path)
    try:
        until(lambda: learned(run) >= 2, training)
        engine = session(run)
        assert len(engine) >= 3  # what ends it, its server, and the one that samples
    finally:
        training.kill()
        training.wait()
    until(lambda: session(run) == [] and not any(map(alive, engine)))
    again = train(tmp_path, "--resume")
    assert again.wait(START_S * 2) == 0, (tmp_path / "output.txt").read_text()
    assert learned(run) == ITERATIONS
    assert session(run) == []
    assert all(json.loads(line)["holds"] for line in (run / "policies" / PROOFS).read_text().splitlines())
    metrics = rows(run / "replay.sqlite", "select name, iteration, value from metrics")
    drift = [value for name, _, value in metrics if name == "actor/fresh/drift_max"]
    parts = {name: value for name, iteration, value in metrics if iteration == ITERATIONS and "time/publish" in name}
    print(f"drift at most {max(drift):.6f}; {parts}")
    assert len(drift) == ITERATIONS and max(drift) <= 1.001


def test_a_server_sleeps_and_wakes_with_new_weights(tmp_path: Path) -> None:
    """A CPU gives no memory free: what is shown is that its routes are asked rightly, in an order that they take."""
    learner = tiny_learner(tmp_path / "model")
    published(tmp_path / "000000", learner)
    with real_engine(tmp_path / "000000", tmp_path) as engine:
        publish(engine, tmp_path / "000000")
        for version, level in enumerate((1, 2, 2), start=1):
            engine.sleep(level)
            asleep = httpx2.get(f"{engine.url}/is_sleeping").json()
            assert asleep == {"is_sleeping": True} and (engine.label() == ASLEEP) == (level == 2)
            step(learner, seed=version)
            published(tmp_path / f"{version:06d}", learner, version=version)
            proof = publish(engine, tmp_path / f"{version:06d}")
            assert httpx2.get(f"{engine.url}/is_sleeping").json() == {"is_sleeping": False}
            print(f"level {level}: woke in {engine.wake_s:.3f} s, {proof}")


def train(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    config = folder / "config.yaml"
    if not config.exists():
        given = small_config(
            folder,
            save_vllm_llama(folder / "model"),
            run={"name": "small", "folder": str(folder / "runs"), "iterations": ITERATIONS, "seed": 0},
            rollout={"engine": "vllm"},
            engine={"serve": True, "options": ["--dtype", "float32", *SMALL]},
        )
        config.write_text(yaml.safe_dump(to_plain(given)))
    environment = {**os.environ, **SMALL_MACHINE, "AGENTLOOP_VLLM": str(EXECUTABLE), "AGENTLOOP_ENGINE_KEY": KEY}
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [AGENTLOOP, "train", str(config), *words], cwd=ROOT, env=environment, stdout=output, stderr=output
        )


def learned(run: Path) -> int:
    database = run / "replay.sqlite"
    made = database.exists() and rows(database, "select name from sqlite_master where name = 'iterations'")
    return int(rows(database, "select count(*) from iterations")[0][0]) if made else 0


def session(run: Path) -> list[int]:
    """All processes of the run's engines, whatever they call themselves."""
    ports = [log.stem.rpartition("-")[2] for log in run.glob("engine-*.log")]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            leader = Path("/proc") / str(os.getsid(int(folder.name))) / "cmdline"
            if any(f"--port\0{port}\0" in leader.read_text() for port in ports):
                found.append(int(folder.name))
    return found


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


def until(holds: Callable[[], bool], training: subprocess.Popen[bytes] | None = None) -> None:
    end = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < end
        assert training is None or training.poll() is None
        time.sleep(0.5)
