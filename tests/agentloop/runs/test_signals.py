"""Ctrl-C and SIGTERM end a run, whatever its tools do."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

_RUN = """
import itertools, sys
from agentloop.runs.signals import graceful_stop
with graceful_stop(lambda text: None) as stop, stop.working():
    print("ready", flush=True)
    max(itertools.repeat(1))  # keeps the interpreter's lock for ever
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_run_whose_tool_keeps_the_interpreters_lock(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", _RUN], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        time.sleep(0.3)
        run.send_signal(number)
        time.sleep(0.3)
        assert run.poll() is None
        began = time.monotonic()
        run.send_signal(number)
        assert run.wait(timeout=10) == -signal.SIGKILL
        assert time.monotonic() - began < 10


def test_a_run_that_ends_leaves_no_watching_process_behind() -> None:
    script = (
        "import subprocess\n"
        "from agentloop.runs.signals import graceful_stop\n"
        "with graceful_stop(lambda text: None): pass\n"
        "print(subprocess.run(['pgrep', '-P', str(__import__('os').getpid()), '-f', 'select'], "
        "capture_output=True, text=True).stdout)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
