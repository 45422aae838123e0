"""An engine ends with who started it, is given the newest policy with a proof, and one that dies says why."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.publish.proof import publish
from agentloop.engines.publish.published_policy import one_publisher
from agentloop.engines.serving.engine_process import EngineProcess, free_port
from agentloop.engines.serving.engine_watch import EngineWatch
from agentloop.engines.serving.served_engine import EngineEnded
from agentloop.errors import UserError
from agentloop.models.loading import LoadedModel
from tests.fakes.engine_server import EngineServer
from tests.fakes.processes import processes, stat, until
from tests.fakes.published_policies import published, step
from tests.fakes.runs import ROOT

LIMIT_S = 60.0
STARTER = """
import sys, time
from pathlib import Path
from agentloop.engines.serving.engine_process import EngineProcess
EngineProcess(["sh", "-c", "sleep 1000 & sleep 1000"], {}, port=int(sys.argv[1]), log=Path(sys.argv[2]))
print("started", flush=True)
time.sleep(1000)
"""


def test_watch_ends_with_the_last_error_of_the_log(tmp_path: Path, engine: EngineControl, server: EngineServer) -> None:
    die = f"until [ -e {tmp_path / 'die'} ]; do sleep 0.02; done; echo EngineDeadError: asked to die; exit 3"
    process = EngineProcess(["sh", "-c", die], {"PATH": os.environ["PATH"]}, port=free_port(), log=tmp_path / "log")
    said = list[str]()

    def hear(line: str) -> None:
        said.append(line)
        if "serves policy 000000, proved" in line:
            (tmp_path / "die").touch()  # what it had started may still answer

    with pytest.raises(EngineEnded, match="^vllm serve must go on serving, got exit code 3: EngineDeadError: asked to"):
        EngineWatch(engine, tmp_path, say=hear).serve(process)
    assert len(said) == 2 and said[0].startswith("answers at http://127.0.0.1:")


def test_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port must be free, got {port}: "):
            EngineProcess(["true"], {}, port=port, log=tmp_path / "log")


def test_each_policy_is_published_once_even_where_it_is_refused(
    tmp_path: Path, learner: LoadedModel, engine: EngineControl, server: EngineServer
) -> None:
    said = list[str]()
    watch = EngineWatch(engine, tmp_path, say=said.append)
    watch.publish_newest()
    watch.publish_newest()
    server.models.head_stays_old = True
    step(learner, seed=1)
    published(tmp_path / "000001", learner, version=1)
    watch.publish_newest()
    watch.publish_newest()
    server.models.head_stays_old = False
    published(tmp_path / "000002", learner, version=2)
    watch.publish_newest()
    assert server.models.loaded == ["000000", "000001", "000002"]
    assert [line[:20] for line in said] == ["serves policy 000000", "refused: the engine ", "serves policy 000002"]


def test_watch_waits_for_a_learner_that_publishes_and_takes_what_is_newest_then(
    tmp_path: Path, learner: LoadedModel, engine: EngineControl, server: EngineServer
) -> None:
    said = list[str]()
    watch = EngineWatch(engine, tmp_path, say=said.append)
    looking = threading.Thread(target=watch.publish_newest)
    with one_publisher(tmp_path, engine.url):
        looking.start()
        looking.join(0.2)
        assert looking.is_alive()
        step(learner, seed=1)
        published(tmp_path / "000001", learner, version=1)
        publish(engine, tmp_path / "000001")
    looking.join(LIMIT_S)
    assert server.models.loaded == ["000001"]
    assert [line[:21] for line in said] == ["serves policy 000001,"]


@pytest.mark.slow
def test_engine_ends_with_a_starter_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(free_port()), str(tmp_path / "engine.log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        starter.stdout.readline()
        (leader,) = processes(lambda folder: stat(folder)[1] == starter.pid)
        until(lambda: len(group(leader)) == 4)  # what watches the starter, the shell, and its two sleeps
        starter.kill()
    until(lambda: group(leader) == [])


def group(leader: int) -> list[int]:
    """The processes of this group that have not ended."""
    return processes(lambda folder: stat(folder)[2] == leader and stat(folder)[0] != "Z")


def test_a_program_says_why_it_does_not_start_and_may_put_things_in_order_when_it_is_ended(tmp_path: Path) -> None:
    log, port = tmp_path / "engine.log", free_port()
    process = EngineProcess(["sh", "-c", "echo OSError: missing is no model; exit 1"], {}, port=port, log=log)
    with pytest.raises(UserError, match="vllm serve must start, got exit code 1: OSError: missing is no model"):
        process.wait_until(lambda: False, limit_s=LIMIT_S, stopped=lambda: False)
    process.end()
    script = 'trap "echo ended; exit 5" TERM; echo started; while :; do sleep 0.05; done'
    process = EngineProcess(["sh", "-c", script], {"PATH": os.environ["PATH"]}, port=port, log=log)
    until(lambda: log.read_text().endswith("started\n"))
    process.end()
    assert log.read_text().endswith("ended\n") and process.exit_code == 5
