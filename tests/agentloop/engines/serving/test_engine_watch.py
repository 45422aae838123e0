"""An engine is started again when it dies, and is given the newest policy with a proof, once."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.publish.one_publisher import one_publisher
from agentloop.engines.publish.proof import publish
from agentloop.engines.serving.engine_process import EngineProcess
from agentloop.engines.serving.engine_watch import EngineWatch, PolicyWatch
from agentloop.errors import UserError
from tests.fakes import vllm_program
from tests.fakes.learner_engine import LearnerEngine
from tests.fakes.published_policies import label, published, step, tiny_learner
from tests.vllm.server import free_port

PROGRAM = (sys.executable, str(vllm_program.__file__))
LIMIT_S = 60.0


@contextmanager
def watched(folder: Path, port: int) -> Iterator[list[str]]:
    """A watch over a program in the place of vLLM, in a thread; what it says."""
    said: list[str] = []
    stop = threading.Event()
    with EngineControl(f"http://127.0.0.1:{port}", model="tiny") as control:
        policies = PolicyWatch(LearnerEngine(folder / "000000"), folder, said.append)
        watch = EngineWatch(control, policies, say=said.append, stopped=stop.is_set)
        command = [*PROGRAM, "serve", "model", "--port", str(port)]
        settings = {"port": port, "log": folder / "engine.log", "start_timeout_s": LIMIT_S}
        thread = threading.Thread(target=watch.serve, args=(command, {"PATH": "/bin"}), kwargs=settings)
        thread.start()
        try:
            yield said
        finally:
            stop.set()
            thread.join(LIMIT_S)
    assert not thread.is_alive()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_dead_engine_is_started_and_proved_again(tmp_path: Path) -> None:
    published(tmp_path / "000000", tiny_learner(tmp_path / "model"))
    port = free_port()
    with watched(tmp_path, port) as said:
        until(lambda: any("serves policy 000000, proved" in line for line in said))
        with pytest.raises(httpx2.HTTPError):
            httpx2.post(f"http://127.0.0.1:{port}/die")
        until(lambda: sum("serves policy 000000, proved" in line for line in said) == 2)
    assert "has ended with exit code 3: EngineDeadError: asked to die" in said
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"http://127.0.0.1:{port}/health")


def test_policy_is_published_once_and_again_after_a_restart(tmp_path: Path) -> None:
    learner = tiny_learner(tmp_path / "model")
    published(tmp_path / "000000", learner)
    engine, said = LearnerEngine(tmp_path / "000000"), list[str]()
    watch = PolicyWatch(engine, tmp_path, said.append)
    watch.look()
    watch.look()
    step(learner, seed=1)
    published(tmp_path / "000001", learner, version=1)
    watch.look()
    engine.restart()
    watch.forget()
    watch.look()
    assert engine.calls == [f"reload {label(tmp_path / name)}" for name in ("000000", "000001", "000001")]
    assert [line[:21] for line in said] == ["serves policy 000000,", "serves policy 000001,", "serves policy 000001,"]


def test_watch_waits_for_a_learner_that_publishes_and_takes_what_is_newest_then(tmp_path: Path) -> None:
    learner = tiny_learner(tmp_path / "model")
    published(tmp_path / "000000", learner)
    engine, said = LearnerEngine(tmp_path / "000000"), list[str]()
    watch = PolicyWatch(engine, tmp_path, said.append)
    looking = threading.Thread(target=watch.look)
    with one_publisher(tmp_path, engine.url):
        looking.start()
        looking.join(0.2)
        assert looking.is_alive()
        step(learner, seed=1)
        published(tmp_path / "000001", learner, version=1)
        publish(engine, tmp_path / "000001")
    looking.join(LIMIT_S)
    assert engine.calls == [f"reload {label(tmp_path / '000001')}"]
    assert [line[:21] for line in said] == ["serves policy 000001,"]


def test_refused_policy_is_said_once_and_the_next_one_tried(tmp_path: Path) -> None:
    learner = tiny_learner(tmp_path / "model")
    published(tmp_path / "000000", learner)
    engine, said = LearnerEngine(tmp_path / "000000"), list[str]()
    engine.head_stays_old = True
    step(learner, seed=1)
    published(tmp_path / "000001", learner, version=1)
    watch = PolicyWatch(engine, tmp_path, said.append)
    watch.look()
    watch.look()
    engine.head_stays_old = False
    published(tmp_path / "000002", learner, version=2)
    watch.look()
    assert [line.partition(" ")[0] for line in said] == ["refused:", "serves"]


def test_program_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = [*PROGRAM, "serve", "missing"]
    process = EngineProcess(command, {}, port=free_port(), log=tmp_path / "engine.log")
    with pytest.raises(UserError, match="vllm serve must start, got exit code 1: OSError: missing is no model"):
        process.wait_until(lambda: False, limit_s=LIMIT_S, stopped=lambda: False)
    process.end()


def test_taken_port_is_refused(tmp_path: Path) -> None:
    port = free_port()
    process = EngineProcess([*PROGRAM, "serve", "m", "--port", str(port)], {}, port=port, log=tmp_path / "engine.log")
    try:
        with EngineControl(f"http://127.0.0.1:{port}", model="tiny") as control:
            assert process.wait_until(control.healthy, limit_s=LIMIT_S, stopped=lambda: False)
        with pytest.raises(UserError, match=f"--port must be free, got {port} .*--attach http://127.0.0.1:{port}"):
            EngineProcess(PROGRAM, {}, port=port, log=tmp_path / "other.log")
    finally:
        process.end()
    assert process.exit_code is not None


def test_attached_engine_is_proved_again_when_it_is_back(tmp_path: Path) -> None:
    published(tmp_path / "000000", tiny_learner(tmp_path / "model"))
    engine, said = LearnerEngine(tmp_path / "000000"), list[str]()
    stop = threading.Event()
    watch = EngineWatch(engine, PolicyWatch(engine, tmp_path, said.append), say=said.append, stopped=stop.is_set)
    thread = threading.Thread(target=watch.attach)
    thread.start()
    try:
        until(lambda: any("serves policy 000000" in line for line in said))
        engine.is_healthy = False
        until(lambda: any("is gone from" in line for line in said))
        engine.restart()
        engine.is_healthy = True
        until(lambda: sum("serves policy 000000" in line for line in said) == 2)
    finally:
        stop.set()
        thread.join(LIMIT_S)
    assert engine.calls == [f"reload {label(tmp_path / '000000')}"] * 2
