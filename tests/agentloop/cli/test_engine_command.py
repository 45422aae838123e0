"""`agentloop engine` says in one line what it needs, and leaves when it is asked to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agentloop.engines.serving.test_engine_watch import LIMIT_S, until
from tests.fakes.runs import ROOT
from tests.fakes.scripted_http import scripted_server
from tests.fakes.shell import Shell


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "MODEL must be given, or --attach, but not both, got None and None."),
        (("m", "--attach", "http://127.0.0.1:9"), "MODEL must be given, or --attach, but not both, got m and http://"),
        (("m", "--run", "/nowhere", "--wait", "0"), "--run must be the folder of a run, got '/nowhere', which is not "),
        (("m", "--vllm", "/nowhere/vllm"), "--vllm must be vLLM's own executable, got '/nowhere/vllm'"),
    ],
)
def test_what_it_needs_is_one_line(words: tuple[str, ...], expected: str, shell: Shell, tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert shell.refusal(["engine", *words], tmp_path).startswith(expected)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.slow
def test_attached_it_says_whether_the_engine_answers_and_leaves_when_asked(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    environment = {**os.environ, "AGENTLOOP_ENGINE_KEY": "the-secret"}
    with scripted_server() as server, output.open("wb") as file:
        server.answers["/health"] = (200, None)
        run = tmp_path / "run-001"  # which is there only later
        command = [sys.executable, "-m", "agentloop", "engine", "--attach", server.url, "--run", str(run)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
        try:
            until(lambda: "engine: waits for the run" in output.read_text())
            run.mkdir()
            until(lambda: f"engine: answers at {server.url}" in output.read_text())
            server.answers["/health"] = (503, None)
            until(lambda: "does not answer at" in output.read_text())
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()
            process.wait()
    assert "the-secret" not in output.read_text()
