"""A run with a real vLLM of its own: killed, it leaves no process; resumed, it learns with another."""

import json
from pathlib import Path

import pytest

from agentloop.engines.publish.proof import PROOFS
from tests.fakes.processes import Training, processes, stat, until, write_config
from tests.fakes.runs import rows, save_vllm_llama, small_config
from tests.soak.test_launched_quickstart import committed
from tests.vllm.server import EXECUTABLE, KEY, SMALL, SMALL_MACHINE, START_S, is_of_server, missing

pytestmark = [pytest.mark.soak, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
ITERATIONS = 6


@pytest.mark.timeout(3600)
def test_a_run_that_was_killed_leaves_no_engine_and_goes_on_with_another(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "small-001"
    with train(tmp_path) as training:
        until(lambda: training.ended or committed(run) >= 2, limit_s=START_S)
        assert not training.ended, training.output
        engine = session(run)
        assert len(engine) >= 3  # what ends it, its server, and the one that samples
    alive = [Path(f"/proc/{pid}") for pid in engine]
    until(lambda: session(run) == [] and not processes(lambda at: at in alive and stat(at)[0] != "Z"), limit_s=START_S)
    with train(tmp_path, "--resume") as again:
        assert again.wait(timeout_s=START_S * 2) == 0, again.output
    assert committed(run) == ITERATIONS
    assert session(run) == []
    assert all(json.loads(line)["holds"] for line in (run / "policies" / PROOFS).read_text().splitlines())
    metrics = rows(run / "replay.sqlite", "select name, iteration, value from metrics")
    gaps = [value for name, _, value in metrics if name == "actor/fresh/token_gap_max"]
    parts = {name: value for name, iteration, value in metrics if iteration == ITERATIONS and "time/publish" in name}
    print(f"gap at most {max(gaps):.6f} nats; {parts}")
    assert len(gaps) == ITERATIONS and max(gaps) <= 0.0009995  # log 1.001


def train(folder: Path, *words: str) -> Training:
    config = folder / "config.yaml"
    if not config.exists():
        given = small_config(
            folder,
            save_vllm_llama(folder / "model"),
            run={"name": "small", "folder": str(folder / "runs"), "iterations": ITERATIONS, "seed": 0},
            rollout={"engine": "vllm"},
            engine={"serve": True, "options": ["--dtype", "float32", *SMALL]},
        )
        write_config(given, config)
    place = {**SMALL_MACHINE, "AGENTLOOP_VLLM": str(EXECUTABLE), "AGENTLOOP_ENGINE_KEY": KEY}
    return Training(config, *words, place=place)


def session(run: Path) -> list[int]:
    """All processes of the run's engines, whatever they call themselves."""
    ports = [log.stem.rpartition("-")[2] for log in run.glob("engine-*.log")]
    return processes(lambda folder: any(is_of_server(folder, port) for port in ports))
