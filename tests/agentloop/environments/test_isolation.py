"""Tools in processes of their own, and what loud tools cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from agentloop.environments import ToolResult
from agentloop.environments.tools import isolation
from tests.fakes.environments.faulty_tools import LIMITS, call

PATIENT = replace(LIMITS, timeout_s=10.0)
"""For tools that answer: a busy machine takes its time to fork."""


def gone(pid: int) -> bool:
    """Whether a process is dead; a killed one may wait for whoever adopted it."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def wait_until_gone(pids: list[int]) -> bool:
    end = time.monotonic() + 2
    while time.monotonic() < end:
        if all(map(gone, pids)):
            return True
        time.sleep(0.01)
    return False


def test_isolated_tool_runs_in_a_session_of_its_own() -> None:
    pid, session = json.loads(call("apart", {"kind": "pid"}, limits=PATIENT).content)
    assert pid == session != os.getpid()


@pytest.mark.parametrize(
    ("kind", "content", "error_kind"),
    [
        ("ok", "fine\ufffd", "not_text"),
        ("raise", '{"error": "ZeroDivisionError: division by zero"}', "raised"),
        ("die", '{"error": "the tool\'s process ended without a result (exit code 7)"}', "crashed"),
        ("crash", '{"error": "the tool\'s process ended without a result (signal 10)"}', "crashed"),
        ("spin, catching", '{"error": "apart took longer than 0.3 s"}', "timeout"),
    ],
)
def test_isolated_tool_answers_like_any_other(kind: str, content: str, error_kind: str) -> None:
    limits = LIMITS if error_kind == "timeout" else PATIENT
    assert call("apart", {"kind": kind}, limits=limits) == ToolResult(content, error_kind)


def test_rubbish_in_the_pipe_of_an_isolated_tool_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    write = isolation._write_all
    monkeypatch.setattr(isolation, "_write_all", lambda pipe, frame: write(pipe, b"\xff" * 20_000))
    assert call("apart", {"kind": "ok"}, limits=PATIENT).error_kind == "crashed"


def test_isolated_tool_leaves_no_child_behind() -> None:
    children = json.loads(call("apart", {"kind": "fork"}, limits=PATIENT).content)
    assert len(children) == 3
    assert wait_until_gone(children)


def test_isolated_tool_that_hangs_dies_with_its_whole_group(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTLOOP_TEST_PIDS", str(tmp_path / "pids"))
    began = time.monotonic()
    # Long enough for its children to be born.
    assert call("apart", {"kind": "fork, hang"}, limits=replace(LIMITS, timeout_s=1.0)).error_kind == "timeout"
    assert time.monotonic() - began < 2.0
    assert wait_until_gone(json.loads((tmp_path / "pids").read_text()))


def test_many_calls_leak_no_file_descriptor() -> None:
    call("apart", {"kind": "ok"})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        call("apart", {"kind": "ok"})
        call("fail", {"kind": "value"})
    assert len(os.listdir("/proc/self/fd")) == before


_LOUD = """
import resource, sys
from agentloop.environments import Environment, ToolLimits, tool
from context.messages import ToolCall
from tests.fakes.environments.faulty_tools import called
class Loud(Environment):
    @tool
    def say(self) -> str:
        '''Print 100 MB.'''
        for _ in range(100):
            print("x" * 1_000_000)
            sys.stderr.write("x" * 1000)
            sys.stdout.buffer.write(b"x" * 1_000_000)
        return "said"
    @tool(isolated=True)
    def give(self) -> str:
        '''Print and return 100 MB.'''
        print("x" * 100_000_000)
        return "y" * 100_000_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
said, given = (called(Loud(), ToolCall(name, {}), ToolLimits(10, 5)) for name in ("say", "give"))
print(said.content, given.content, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_tools_that_print_or_return_100_mb_cost_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", _LOUD], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    text, megabytes = done.stdout.strip().rsplit(" ", 1)
    assert text == "said yyyyy... [cut: 99999995 characters left out]"
    assert int(megabytes) < 64
