import socket
import subprocess
import sys
from contextlib import closing

import pytest

from replay.errors import ReplayError
from replay.pages import serve
from replay.pages.serve import check_token


def test_others_are_served_only_with_a_token_that_can_not_be_guessed() -> None:
    loopback = "--host must be a loopback address without --token, got "
    refused = [(host, None, loopback + host) for host in ("0.0.0.0", "::", "192.168.1.5", "machine.example")]
    short = "--token must have at least 16 characters, got 15"
    unprintable = "--token must be of printable ASCII characters"
    for host, token, problem in [*refused, ("127.0.0.1", "x" * 15, short), ("", "слово-из-многих-букв", unprintable)]:
        with pytest.raises(ReplayError, match=problem):
            check_token(host, token)
        check_token(host, "x" * 16)


def test_the_next_free_port_is_taken_unless_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(serve, "PORT", port)
        with closing(serve.listen("127.0.0.1", None)) as next_one:
            assert port < next_one.getsockname()[1] < port + 20
        with pytest.raises(ReplayError, match=f"must be free to listen on, got .* for 127.0.0.1 port {port}"):
            serve.listen("127.0.0.1", port)


def test_printed_address_brings_the_token_and_no_body_waits_for_its_headers_to_be_acknowledged() -> None:
    with closing(serve.bound_socket("127.0.0.1", 0)) as listening:
        here = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        assert serve.address_of(listening, None) == here
        assert serve.address_of(listening, "t" * 16) == f"{here}?token={'t' * 16}"
        assert serve.address_of(listening, "a&b=c#d+e f%20;?") == f"{here}?token=a%26b%3Dc%23d%2Be%20f%2520%3B%3F"
        client = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
        with closing(client), closing(accepted):
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.slow
def test_without_the_extra_of_the_inspector_its_command_says_what_to_install() -> None:
    script = "import sys; sys.modules['starlette'] = None; from agentloop.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", script, "inspect"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "pip install 'agentloop-replay[inspect]'" in done.stderr
