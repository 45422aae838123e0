"""What a real vLLM gets wrong without a word is found by the proof, and an engine that died comes back proved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from agentloop.engines.publish.engine_control import EngineControl, EngineRefused
from agentloop.engines.publish.proof import ProofFailed, prove, publish
from agentloop.engines.publish.published_policy import RECORD, PublishedPolicy, folder_hash
from agentloop.models.loading import LoadedModel
from agentloop.runs.checkpoint import write_directory
from tests.fakes.published_policies import label, published, save, step, tiny_learner
from tests.fakes.runs import ROOT
from tests.vllm.environment import EXECUTABLE, missing
from tests.vllm.server import KEY, SMALL, SMALL_MACHINE, START_S, beside_a_learner, free_port, real_engine

pytestmark = [pytest.mark.soak, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def test_a_tied_head_that_stays_old_is_refused(tmp_path: Path) -> None:
    learner = tiny_learner(tmp_path / "model")
    with real_engine(tmp_path / "model", tmp_path) as engine:
        step(learner, seed=1)
        tied(tmp_path / "000001", learner, published(tmp_path / "own", learner, version=1))
        with pytest.raises(ProofFailed, match=r"published tiny@1-\w{8}, must sample .* of a head tied") as said:
            publish(engine, tmp_path / "000001")
        print(said.value)
        assert engine.label() == f"unproved {label(tmp_path / '000001')}"
        published(tmp_path / "000002", learner, version=2)
        print(publish(engine, tmp_path / "000002"))


def tied(target: Path, learner: LoadedModel, policy: PublishedPolicy) -> None:
    """The policy as others write it: without a head, which is the embeddings."""

    def fill(folder: Path) -> None:
        save(learner)(folder)
        record = policy.model_copy(update={"sha256": folder_hash(folder)})
        (folder / RECORD).write_text(record.model_dump_json())

    write_directory(target, fill)


def test_log_probs_from_before_the_temperature_are_refused(tmp_path: Path) -> None:
    learner = tiny_learner(tmp_path / "model")
    published(tmp_path / "000000", learner)
    with real_engine(tmp_path / "000000", tmp_path, "--logprobs-mode", "raw_logprobs") as engine:
        with pytest.raises(ProofFailed, match="start it with --logprobs-mode processed_logprobs") as said:
            publish(engine, tmp_path / "000000")
        print(said.value)
        published(tmp_path / "one", learner, run="one", temperature=1.0)
        assert publish(engine, tmp_path / "one").difference < 1e-4


def test_an_engine_that_died_serves_nothing_until_it_is_proved_again(tmp_path: Path) -> None:
    """Through the front door: killed twice, it comes back once with its first weights, once with the newest."""
    learner = tiny_learner(tmp_path / "model")
    published(tmp_path / "000000", learner)
    step(learner, seed=1)
    policy = published(tmp_path / "new", learner, version=1)
    run = tmp_path / "run"
    run.mkdir()
    port = free_port()
    with engine_command(tmp_path / "000000", run, port) as (control, lines):
        until(control.healthy)
        publish(control, tmp_path / "new")
        signal_worker(port, signal.SIGKILL)
        until(lambda: lines().count("answers at") == 2)
        with pytest.raises(ProofFailed, match="must call its weights so, got 'default'"):
            prove(control, policy)
        control.name_weights(policy.label)
        with pytest.raises(ProofFailed, match="must sample with the learner's log-probs"):
            prove(control, policy)
        (run / "policies").mkdir()
        (tmp_path / "new").rename(run / "policies" / "000001")
        until(lambda: "serves policy 000001" in lines())
        prove(control, policy)
        signal_worker(port, signal.SIGKILL)
        until(lambda: lines().count("serves policy 000001") == 2)
        assert prove(control, policy).difference < 1e-4
        print(lines())
    assert KEY not in lines() + (run / next(run.glob("engine-*.log")).name).read_text(errors="replace")


def test_an_engine_that_stands_still_is_started_anew(tmp_path: Path) -> None:
    """Its server goes on answering: a worker that is stopped is noticed by what it was asked in vain."""
    run, port = tmp_path / "run", free_port()
    published(run / "policies" / "000000", tiny_learner(tmp_path / "model"))
    with engine_command(run / "policies" / "000000", run, port, "--silence", "15") as (control, lines):
        until(lambda: "serves policy 000000" in lines())
        signal_worker(port, signal.SIGSTOP)
        with (
            EngineControl(control.url, model="policy", key=KEY, timeout_s=2) as impatient,
            pytest.raises(EngineRefused, match="must answer /inference/v1/generate, got ReadTimeout"),
        ):
            impatient.scored([5, 6], temperature=1.0, model="policy")
        until(lambda: lines().count("serves policy 000000") == 2)
        print(lines())
        assert "has said nothing for 15 s; it is started again" in lines()


@contextmanager
def engine_command(model: Path, run: Path, port: int, *more: str) -> Iterator[tuple[EngineControl, Callable[[], str]]]:
    """`agentloop engine` as people type it; what it has said so far comes of the second."""
    program = beside_a_learner(EXECUTABLE, run)
    words = ["engine", str(model), "--run", str(run), "--vllm", str(program), "--port", str(port)]
    words += ["--dtype", "float32", "--max-model-len", "2048", *more, "--", *SMALL]
    output = run / "output.txt"
    environment = {**os.environ, **SMALL_MACHINE, "AGENTLOOP_ENGINE_KEY": KEY}
    with output.open("wb") as file:
        command = [sys.executable, "-m", "agentloop", *words]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    try:
        with EngineControl(f"http://127.0.0.1:{port}", model="policy", key=KEY) as control:
            yield control, output.read_text
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, output.read_text()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def signal_worker(port: int, number: signal.Signals) -> None:
    """To the process that has the weights, of the server that listens on `port`."""
    sent = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "cmdline").read_text().startswith("VLLM::Worker"):
                leader = Path("/proc") / str(os.getsid(int(folder.name))) / "cmdline"
                if f"--port\0{port}\0" in leader.read_text():
                    os.kill(int(folder.name), number)
                    sent += 1
    assert sent == 1


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.5)
