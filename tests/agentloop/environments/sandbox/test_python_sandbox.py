"""A program runs in a sandbox, what it prints comes back, and where there is no sandbox nothing is run."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentloop.environments import Task, load_environment
from agentloop.environments.sandbox import PythonSandbox, Returned, SandboxLimits, SandboxRun, call_function
from agentloop.environments.sandbox.python_sandbox import usable_interpreter
from agentloop.errors import UserError
from context.messages import Message
from tests.docs.blocks import ROOT
from tests.fakes.environments.faulty_tools import ask
from tests.fakes.refusals import refusal_of


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_run_returns_what_was_printed_and_the_exit_code(kind: str) -> None:
    run = PythonSandbox(kind).run("import sys\nprint('out', flush=True)\nprint('err', file=sys.stderr)\nsys.exit(3)")
    assert (run.output, run.exit_code, run.stopped) == ("out\nerr\n", 3, None)
    assert PythonSandbox(kind).run("import os\nos.kill(os.getpid(), 9)").exit_code == 128 + 9


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_run_ends_at_its_limits(kind: str) -> None:
    short = PythonSandbox(kind, SandboxLimits(seconds=0.5))
    deaf = "import signal, time\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)"
    for endless in (deaf, "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(60)", "9 ** 9 ** 9"):
        run = short.run(endless)
        assert (run.stopped, run.exit_code) == ("time", None)
    sandbox = PythonSandbox(kind, SandboxLimits(output_bytes=10))
    for flood in ("import os\nos.fork()\nos.fork()\nwhile True: os.write(1, b'x')", "print('x' * 11)"):
        run = sandbox.run(flood)
        assert (run.stopped, run.output) == ("output", "x" * 10)
    assert sandbox.run("print('x' * 9)").stopped is None


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
    assert "No module named 'agentloop'" in PythonSandbox().run("import agentloop").output


def test_observation_is_the_output_and_how_it_ended() -> None:
    ended: dict[tuple[str, int | None, Any], str] = {
        ("5\n", 0, None): "5",
        ("", 0, None): "(no output)",
        ("NameError: x\n", 1, None): "NameError: x\n[exit code 1]",
        ("1\n", None, "time"): "1\n[stopped: it took longer than 5 s]",
        ("", None, "memory"): "[stopped: it took more than 512 MiB of memory]",
        ("x", None, "output"): "x\n[stopped: it printed more than 20000 bytes]",
    }
    for facts, text in ended.items():
        assert SandboxRun(*facts, SandboxLimits()).observation() == text


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
def test_nothing_is_run_where_bubblewrap_is_missing_or_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", "/nowhere")
    assert refusal_of(PythonSandbox) == (
        "sandbox must be able to contain a program on this machine, got: there is no bwrap (package bubblewrap). "
        "Install bubblewrap 0.8 or newer where user namespaces are allowed, or set sandbox: none to run code that "
        "nothing contains."
    )
    assert PythonSandbox("none").run("print(6 * 7)").output == "42\n"
    # As in a container that forbids namespaces: bubblewrap is there, and says so.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        refusing = Path(folder, "bwrap")
        refusing.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
        refusing.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{path}")
        with pytest.raises(UserError, match="got: bubblewrap must begin, got bwrap: No permissions to create new name"):
            PythonSandbox()
    with pytest.raises(UserError, match=r"^sandbox must be bubblewrap or none, got 'docker'\. Set one of them\.$"):
        PythonSandbox("docker")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"SandboxLimits\nmemory_mb\n.*greater than or equal to 32 .*input_value=31"):
        SandboxLimits(memory_mb=31)


def test_environment_offers_programs_in_its_sandbox_and_rewards_may_run_the_reply() -> None:
    options = {"sandbox": "none", "limits": {"seconds": 10, "output_bytes": 500}}
    factory = load_environment(f"{ROOT}/examples/squares.py:Squares", options)
    environment = factory.create()
    assert environment.sandbox.limits == SandboxLimits(seconds=10, output_bytes=500)  # type: ignore[attr-defined]
    assert ask(environment, "run_python", code="print(3 ** 2)").content == "9"
    wrong = ask(environment, "run_python", code="print(x)").content
    assert wrong.endswith("NameError: name 'x' is not defined\n[exit code 1]")
    replies = [Message("assistant", text, author="llm") for text in ("print(3 * 3)", "print(6)", "no program")]
    task = Task("Print the square of 3.", {"of": 3})
    assert [factory.create().reward(task, [reply]) for reply in replies] == [1.0, 0.0, 0.0]


# Functions of a policy's code


def returned(code: str, *arguments: Any, limits: SandboxLimits | None = None) -> tuple[Returned, ...]:
    return call_function(PythonSandbox(limits=limits), code, "f", [[argument] for argument in arguments])


def test_each_call_has_what_the_function_returned_and_not_what_it_printed() -> None:
    assert returned("def f(x): return x[::-1]", "ab", [1, 2]) == (Returned("ba"), Returned([2, 1]))
    half = {"n": 3, "half": 1.5, "none": None}
    assert returned("f = lambda x: {'n': x, 'half': x / 2, 'none': None}", 3) == (Returned(half),)
    assert [Returned(1).equals(value) for value in (1, 1.0, True, "1", None)] == [True, False, False, False, False]
    assert Returned({"a": 1, "b": 2}).equals({"b": 2, "a": 1})
    assert Returned(None).equals(None) and not Returned(None, "ValueError: x").equals(None)
    noisy = "import sys\nprint('[7, null]')\ndef f(x):\n    print('[7, null]')\n    sys.stderr.write('x')\n    return x"
    assert returned(noisy, 1, 2) == (Returned(1), Returned(2))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("def f(x) return x", "SyntaxError: expected ':' (answer.py, line 1)"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def g(x): return x", "KeyError: 'f'"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("def f(x): return {1, 2}", "TypeError: Object of type set is not JSON serializable"),
        ("def f(x): return f(x)", "RecursionError: maximum recursion depth exceeded"),
        ("def f(x): __import__('os')._exit(0)", "it ended early"),
        ("def f(x): __import__('os').kill(__import__('os').getpid(), 11)", "[exit code 139]"),
    ],
)
def test_code_that_gives_no_value_gives_an_error(code: str, error: str) -> None:
    assert returned(code, 1, 2) == (Returned(None, error),) * 2


def test_calls_beside_one_that_fails_or_hangs_are_kept() -> None:
    assert returned("def f(x): return 1 // x", 0, -1)[1] == Returned(-1)
    hanging = "def f(x):\n    while x == 2: pass\n    return x"
    found = returned(hanging, 1, 2, 3, limits=SandboxLimits(seconds=1.0))
    assert found == (Returned(1), *[Returned(None, "[stopped: it took longer than 1 s]")] * 2)
