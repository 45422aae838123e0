"""Ctrl-C and SIGTERM end a run, whatever its tools do."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

_TERMINATES = """
import multiprocessing, os, signal, threading, time
from agentloop.runs.signals import graceful_stop

def sleep(begun):
    begun.set()
    time.sleep(60)

def use_processes():
    fork = multiprocessing.get_context("fork")
    begun = fork.Event()
    process = fork.Process(target=sleep, args=(begun,))
    process.start()
    begun.wait()
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM, process.exitcode
    with fork.Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]

with graceful_stop(print) as stop, stop.working():
    use_processes()
    beside = threading.Thread(target=use_processes)
    beside.start()
    beside.join()
    assert not stop.requested
print("whole")
"""


def test_processes_that_are_terminated_do_not_stop_the_run_that_forked_them() -> None:
    done = subprocess.run([sys.executable, "-c", _TERMINATES], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "whole\n", "")


_KEEPS = """
import multiprocessing, os, signal, sys, time
from concurrent.futures import ProcessPoolExecutor
from agentloop.errors import raise_run_stop
from agentloop.runs.signals import graceful_stop

signal.signal(signal.SIGINT, raise_run_stop)  # as commands do
with graceful_stop(lambda text: None) as stop, stop.working():
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
    print(pool.submit(os.getpid).result(), flush=True)
    while not stop.requested:
        time.sleep(0.01)
    time.sleep(0.5)  # what would end it has come by then
    print(pool.submit(os.getpid).result(), flush=True)
    if sys.argv[1] == "twice":
        time.sleep(60)
sys.exit(stop.exit_code)
"""


@pytest.mark.parametrize("times", ["once", "twice"])
def test_processes_that_were_forked_leave_ctrl_c_to_the_run_and_end_with_it(times: str) -> None:
    command = [sys.executable, "-c", _KEEPS, times]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        assert run.stdout is not None
        child = run.stdout.readline()
        os.killpg(run.pid, signal.SIGINT)
        assert run.stdout.readline() == child
        if times == "twice":
            os.killpg(run.pid, signal.SIGINT)
        assert run.stdout.read() == ""  # which ends once the child has ended, too
        assert run.wait() == 130


def test_program_that_a_forked_process_begins_can_be_interrupted() -> None:
    script = (
        "import subprocess\nfrom agentloop.runs.signals import graceful_stop\n"
        "with graceful_stop(print):\n"
        "    program = subprocess.Popen(['sleep', '60'], preexec_fn=lambda: None)\n"
        "    program.send_signal(2)\n"
        "    print(program.wait())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "-2\n"


def test_code_that_fails_after_a_stop_was_asked_for_ends_the_run_as_stopped() -> None:
    """Ctrl-C may have ended processes that the code needs."""
    script = (
        "import os, signal\nfrom agentloop.errors import raise_run_stop\n"
        "from agentloop.runs.signals import graceful_stop\nfrom agentloop.user_code import failing_as\n"
        "signal.signal(signal.SIGINT, raise_run_stop)\n"
        "with graceful_stop(print) as stop, stop.working():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    with failing_as('mine.reward must return a number, got', '. Mend it.'):\n"
        "        raise BrokenPipeError('gone')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")
    assert done.stdout.endswith(
        "stopped at once: mine.reward must return a number, got BrokenPipeError: gone. Mend it.\n"
    )


_IN_PYTHON = """
import asyncio, os, signal
from agentloop.environments.tools.worker_threads import run_coroutine
from agentloop.runs.signals import graceful_stop

async def play():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        while not stop.requested:
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
    finally:
        print("closed")

async def cell():
    run_coroutine(play())

in_notebook = lambda: asyncio.new_event_loop().run_until_complete(cell())
for way in (lambda: run_coroutine(play()), in_notebook):
    try:
        with graceful_stop(lambda text: None) as stop, stop.working():
            way()
    except KeyboardInterrupt as stopped:
        print(stopped)
"""


def test_second_ctrl_c_in_python_is_a_keyboard_interrupt_after_which_it_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", _IN_PYTHON], capture_output=True, text=True)
    text = "closed\nstopped at once (--resume, in Python resume=True, continues)\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, 2 * text, "")
