"""`agentloop engine` says in one line what it needs, and leaves when it is asked to."""

import signal
from pathlib import Path

import pytest

from tests.fakes.processes import Program
from tests.fakes.scripted_http import scripted_server
from tests.fakes.shell import Shell


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "MODEL must be given, or --attach, but not both, got None and None."),
        (("m", "--attach", "http://127.0.0.1:9"), "MODEL must be given, or --attach, but not both, got m and http://"),
        (("m", "--run", "/nowhere", "--wait", "0"), "--run must be the folder of a run, got '/nowhere', which is not "),
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
    with scripted_server() as server:
        server.answers["/health"] = (200, None)
        run = tmp_path / "run-001"  # which is there only later
        words, place = ["engine", "--attach", server.url, "--run", run], {"AGENTLOOP_ENGINE_KEY": "the-secret"}
        with Program(*words, place=place) as process:
            process.says("engine: waits for the run")
            run.mkdir()
            process.says(f"engine: answers at {server.url}")
            server.answers["/health"] = (503, None)
            process.says("does not answer at")
            process.send(signal.SIGTERM)
            assert process.wait() == 0
    assert "the-secret" not in process.output
