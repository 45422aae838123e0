"""An engine is asked to end, and ends with whoever started it, with all that it started itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from agentloop.engines.serving.engine_process import EngineProcess
from tests.fakes.runs import ROOT
from tests.vllm.server import free_port

LIMIT_S = 30.0
STARTER = """
import sys, time
from pathlib import Path
from agentloop.engines.serving.engine_process import EngineProcess
process = EngineProcess(["sh", "-c", "sleep 1000 & sleep 1000"], {}, port=int(sys.argv[1]), log=Path(sys.argv[2]))
print(process.pid, flush=True)
time.sleep(1000)
"""


def test_engine_ends_with_a_starter_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(free_port()), str(tmp_path / "engine.log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        leader = int(starter.stdout.readline())
        until(lambda: len(group(leader)) == 4)  # what watches the starter, the shell, and its two sleeps
        starter.kill()
    until(lambda: group(leader) == [])


def test_engine_may_put_things_in_order_when_it_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    script = 'trap "echo ended; exit 5" TERM; echo started; while :; do sleep 0.05; done'
    process = EngineProcess(["sh", "-c", script], {"PATH": os.environ["PATH"]}, port=free_port(), log=log)
    until(lambda: log.read_text() == "started\n")
    process.end()
    assert log.read_text().endswith("ended\n")
    assert process.exit_code == 5


def group(leader: int) -> list[int]:
    """The processes of this group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, pgid = path.read_text().rpartition(") ")[2].split()[:3]
            if int(pgid) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)
