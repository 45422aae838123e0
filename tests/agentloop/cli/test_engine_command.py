"""`agentloop engine` says in one line what it needs, and leaves when it is asked to."""

import signal
from pathlib import Path

import pytest

from agentloop.engines.serving.engine_process import free_port
from tests.fakes.processes import Program
from tests.fakes.run_roles import engine_executable
from tests.fakes.shell import Shell


def test_run_that_is_not_there_is_one_line(shell: Shell, tmp_path: Path) -> None:
    refused = shell.refusal(["engine", "m", "--run", "/nowhere", "--wait", "0"], tmp_path)
    assert refused.startswith("--run must be the folder of a run, got '/nowhere', which is not ")


@pytest.mark.slow
def test_it_waits_for_its_run_and_leaves_when_asked(tmp_path: Path, qwen2: Path) -> None:
    run = tmp_path / "run-001"  # which is there only later
    place = {"AGENTLOOP_VLLM": str(engine_executable(tmp_path)), "AGENTLOOP_ENGINE_KEY": "the-secret"}
    with Program("engine", qwen2, "--run", run, "--port", str(free_port()), place=place) as process:
        process.says("engine: waits for the run")
        run.mkdir()
        process.says("engine: answers at")
        process.send(signal.SIGTERM)
        assert process.wait() == 0
    (log,) = run.glob("engine-*.log")
    assert "the-secret" not in process.output + log.read_text()
