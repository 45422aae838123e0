"""A real vLLM that died comes back proved, and serves nothing until then."""

import os
import signal
from pathlib import Path

import pytest

from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.publish.proof import ProofFailed, prove, publish
from agentloop.engines.serving.engine_process import free_port
from tests.fakes.processes import Program, processes
from tests.fakes.published_policies import published, step, tiny_learner
from tests.vllm.server import KEY, SMALL, SMALL_MACHINE, START_S, beside_a_learner, is_of_server, missing

pytestmark = [pytest.mark.soak, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def test_an_engine_that_died_or_hangs_ends_and_serves_nothing_until_the_next_one_is_proved(tmp_path: Path) -> None:
    """Through the front door, twice as a launcher would: the next one has its first weights until it is proved."""
    learner = tiny_learner(tmp_path / "model")
    published(tmp_path / "000000", learner)
    step(learner, seed=1)
    policy = published(tmp_path / "new", learner, version=1)
    run, port = tmp_path / "run", free_port()
    run.mkdir()
    with engine_command(tmp_path / "000000", run, port) as process, control_of(port) as control:
        process.says("answers at", timeout_s=START_S)
        publish(control, tmp_path / "new")
        signal_worker(port, signal.SIGKILL)
        assert process.wait() == 1 and "vllm serve must go on serving, got exit code" in process.output
    with engine_command(tmp_path / "000000", run, port, "--silence", "15") as process, control_of(port) as control:
        process.says("answers at", timeout_s=START_S)
        with pytest.raises(ProofFailed, match="must have this label for its weights, got 'default'"):
            prove(control, policy)
        control.name_weights(policy.label)
        with pytest.raises(ProofFailed, match="must sample with the learner's log-probs"):
            prove(control, policy)
        (run / "policies").mkdir()
        (tmp_path / "new").rename(run / "policies" / "000001")
        process.says("serves policy 000001", timeout_s=START_S)
        assert prove(control, policy).weights.difference < 1e-4
        # Its server goes on answering: a worker that is stopped is noticed by what it was asked in vain.
        signal_worker(port, signal.SIGSTOP)
        assert process.wait() == 1 and "vllm serve must go on serving, got no answer for 15 s" in process.output
    assert KEY not in process.output + next(run.glob("engine-*.log")).read_text(errors="replace")


def engine_command(model: Path, run: Path, port: int, *more: str) -> Program:
    """`agentloop engine` as people type it."""
    words = ["engine", model, "--run", run, "--port", str(port)]
    words += ["--dtype", "float32", "--max-model-len", "2048", *more, "--", *SMALL]
    place = {**SMALL_MACHINE, "AGENTLOOP_VLLM": str(beside_a_learner(run)), "AGENTLOOP_ENGINE_KEY": KEY}
    return Program(*words, place=place)


def control_of(port: int) -> EngineControl:
    return EngineControl(f"http://127.0.0.1:{port}", model="policy", key=KEY)


def signal_worker(port: int, number: signal.Signals) -> None:
    """To the process that has the weights, of the server that listens on `port`."""

    def has_weights(folder: Path) -> bool:
        return (folder / "cmdline").read_text().startswith("VLLM::Worker") and is_of_server(folder, port)

    (worker,) = processes(has_weights)
    os.kill(worker, number)
