"""A program runs in a sandbox, what it prints comes back, and where there is no sandbox nothing is run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentloop.environments.sandbox import PythonSandbox, SandboxLimits, SandboxRun
from agentloop.environments.sandbox.python_sandbox import usable_interpreter
from agentloop.errors import UserError


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_run_returns_what_was_printed_and_the_exit_code(kind: str) -> None:
    run = PythonSandbox(kind).run("import sys\nprint('out', flush=True)\nprint('err', file=sys.stderr)\nsys.exit(3)")
    assert (run.output, run.exit_code, run.stopped) == ("out\nerr\n", 3, None)


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_run_ends_at_its_limits(kind: str) -> None:
    assert PythonSandbox(kind, SandboxLimits(seconds=0.5)).run("while True: pass").stopped == "time"
    sandbox = PythonSandbox(kind, SandboxLimits(output_bytes=10))
    flood = sandbox.run("print('x' * 11)")
    assert (flood.stopped, flood.output) == ("output", "x" * 10)
    assert sandbox.run("print('x' * 9)").stopped is None


def test_exit_code_of_a_signal_is_128_and_its_number() -> None:
    program = "import os\nos.kill(os.getpid(), 9)"
    assert [PythonSandbox(kind).run(program).exit_code for kind in ("bubblewrap", "none")] == [137, 137]


def test_program_may_be_any_text() -> None:
    sandbox = PythonSandbox()
    assert sandbox.run("print('Grüße', '𝔘')").output == "Grüße 𝔘\n"
    assert sandbox.run("").succeeded
    assert sandbox.run("x = '" + "y" * 300_000 + "'\nprint(len(x))").output == "300000\n"
    for broken in ("print('\0')", "print('\ud800')", "print("):
        assert "SyntaxError" in sandbox.run(broken).output


def test_program_has_the_standard_library_and_two_places_to_write() -> None:
    program = """
import collections, decimal, json, re, sqlite3, statistics, tempfile, threading
from multiprocessing.dummy import Pool
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("mine")
    file.seek(0)
    print(file.read(), Pool(2).map(abs, [-1, -2]), sqlite3.connect(":memory:").execute("select 3").fetchone())
"""
    assert PythonSandbox().run(program).output == "mine [1, 2] (3,)\n"


def test_program_does_not_see_packages_of_this_project() -> None:
    run = PythonSandbox().run("import agentloop")
    assert "No module named 'agentloop'" in run.output


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (SandboxRun("5\n", 0, None, SandboxLimits()), "5"),
        (SandboxRun("", 0, None, SandboxLimits()), "(no output)"),
        (SandboxRun("NameError: x\n", 1, None, SandboxLimits()), "NameError: x\n[exit code 1]"),
        (SandboxRun("", 1, None, SandboxLimits()), "[exit code 1]"),
        (SandboxRun("1\n", None, "time", SandboxLimits()), "1\n[stopped: it took longer than 5 s]"),
        (SandboxRun("", None, "memory", SandboxLimits()), "[stopped: it took more than 512 MiB of memory]"),
        (SandboxRun("x", None, "output", SandboxLimits()), "x\n[stopped: it printed more than 20000 bytes]"),
    ],
)
def test_observation_is_the_output_and_how_it_ended(run: SandboxRun, text: str) -> None:
    assert run.observation() == text


@pytest.mark.parametrize(
    ("name", "value"),
    [("seconds", 0.0), ("memory_mb", 31), ("processes", 0), ("output_bytes", 0), ("files_mb", 0)],
)
def test_limits_must_leave_room_for_a_program(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^SandboxLimits.{name} must be >"):
        SandboxLimits(**{name: value})  # type: ignore[arg-type]


def test_program_runs_within_the_smallest_memory_and_with_one_process() -> None:
    limits = SandboxLimits(memory_mb=32, processes=1, files_mb=1)
    run = PythonSandbox(limits=limits).run("import os\nprint('begun', flush=True)\nos.fork()")
    assert run.output.startswith("begun\n") and "Resource temporarily unavailable" in run.output


@pytest.fixture
def unknown_machine() -> Iterator[None]:
    """What has been found out about this machine is forgotten, before and after."""
    usable_interpreter.cache_clear()
    yield
    usable_interpreter.cache_clear()


@pytest.mark.usefixtures("unknown_machine")
def test_nothing_is_run_where_there_is_no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError) as refused:
        PythonSandbox()
    assert str(refused.value) == (
        "sandbox must be able to contain a program on this machine, got: there is no bwrap (package bubblewrap). "
        "Install bubblewrap 0.8 or newer where user namespaces are allowed, or set sandbox: none to run code that "
        "nothing contains."
    )
    assert PythonSandbox("none").run("print(6 * 7)").output == "42\n"


@pytest.mark.usefixtures("unknown_machine")
def test_nothing_is_run_where_bubblewrap_may_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that forbids namespaces: bubblewrap is there, and says so."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        refusing = Path(folder, "bwrap")
        refusing.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
        refusing.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        with pytest.raises(UserError, match="got: bubblewrap must begin, got bwrap: No permissions to create new name"):
            PythonSandbox()


def test_kind_of_sandbox_is_one_of_two() -> None:
    with pytest.raises(UserError, match=r"^sandbox must be bubblewrap or none, got 'docker'\. Set one of them\.$"):
        PythonSandbox("docker")  # type: ignore[arg-type]
