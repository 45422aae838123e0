"""Who is given a reply and when, what streams show meanwhile, rewards, keys, and how the server begins and ends."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from agentloop.errors import UserError
from agentloop.gateway.endpoints import create_app
from agentloop.gateway.run_gateway import serving
from tests.agentloop.gateway.test_refused_requests import BODIES, CHAT, MESSAGES, RESPONSES, post, refusal
from tests.fakes.agent_sessions import EPISODE, Gateway, ScriptedSessions, said, scripted_gateway

PINGS = {CHAT: ": ping", RESPONSES: ": ping", MESSAGES: "event: ping"}


@contextmanager
def sent(gateway: Gateway, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection whose request has been sent and is being answered."""
    content = json.dumps(body)
    head = f"POST /e/{EPISODE}{path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {gateway.sessions.key()}\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
        gateway.session.asked.wait()
        yield connection


def settled(gateway: Gateway) -> list[str]:
    """The log once the server has done what could be done without a further request."""
    httpx2.get(f"{gateway.url}/v1/models", headers=gateway.headers)
    return gateway.session.log


def test_reply_is_delivered_before_anything_else_is_read(gateway: Gateway) -> None:
    for path in BODIES:
        for stream in (False, True):
            assert post(gateway, path, {**BODIES[path], "stream": stream}).status_code == 200
    steps = ("asked", "stored", "delivered")
    assert settled(gateway) == [f"{step} {number}" for number in range(1, 7) for step in steps]


def test_reply_to_a_client_that_has_hung_up_is_stored_and_not_delivered(gateway: Gateway) -> None:
    for path in BODIES:
        for stream in (False, True):
            gateway.session.requests.clear()
            gateway.session.log.clear()
            for event in (gateway.session.asked, gateway.session.stored, gateway.session.free):
                event.clear()
            with sent(gateway, path, {**BODIES[path], "stream": stream}):
                pass
            settled(gateway)  # by now the server has seen the end of the connection
            gateway.session.free.set()
            gateway.session.stored.wait()
            assert post(gateway, path, BODIES[path]).status_code == 200
            assert settled(gateway) == ["asked 1", "stored 1", "asked 2", "stored 2", "delivered 2"]


def test_end_of_a_connection_that_the_server_sees_only_as_it_answers_counts(gateway: Gateway) -> None:
    gateway.session.blocks = True
    gateway.session.free.clear()
    with sent(gateway, CHAT, BODIES[CHAT]):
        pass
    gateway.session.free.set()
    assert settled(gateway) == ["asked 1", "stored 1"]


def test_long_reply_is_not_delivered_to_a_client_that_leaves_in_the_middle_of_it(gateway: Gateway) -> None:
    gateway.session.says = said("stone " * 4_000_000)
    with sent(gateway, CHAT, BODIES[CHAT]) as connection:
        assert connection.recv(2000).startswith(b"HTTP/1.1 200")
    gateway.session.says = said("A stone.")
    assert post(gateway, CHAT, BODIES[CHAT]).status_code == 200
    assert "delivered 1" not in settled(gateway)


@pytest.mark.parametrize("path", BODIES)
def test_streams_show_pings_until_the_reply_is_there_and_the_same_reply_then(path: str) -> None:
    with scripted_gateway(ping_seconds=0.01) as gateway:
        body = {**BODIES[path], "stream": True, "temperature": 0}
        gateway.session.says = said("Stone: 石, line:\u2028\x85")
        at_once = post(gateway, path, body)
        assert at_once.content.isascii()
        gateway.session.requests.clear()
        gateway.session.free.clear()
        with httpx2.stream("POST", gateway.url + path, json=body, headers=gateway.headers) as response:
            lines = response.iter_lines()
            assert [line for line in (next(lines) for _ in range(12)) if line == PINGS[path]]
            gateway.session.free.set()
            rest = "\n".join(lines)
        assert rest.endswith(at_once.text.rstrip("\n") + "\n")
        assert response.headers["x-agentloop-overruled"] == at_once.headers["x-agentloop-overruled"] == "temperature"
        assert settled(gateway)[-1] == "delivered 1"


@pytest.mark.parametrize("path", BODIES)
def test_failure_of_the_gateway_itself_is_an_error_of_the_clients_provider(path: str) -> None:
    with scripted_gateway(ping_seconds=0.01) as gateway:
        gateway.session.says = RuntimeError("a mistake of ours")
        assert refusal(post(gateway, path, BODIES[path]), 500)[1].startswith("The gateway failed: its log says why.")


REWARDS: list[tuple[dict[str, Any], dict[str, float], bool]] = [
    ({"reward": 1}, {"": 1.0}, False),
    ({"reward": -0.5, "end": True}, {"": -0.5}, True),
    ({"rewards": {"digger": 1, "cook": 0.25}}, {"digger": 1.0, "cook": 0.25}, False),
    ({"end": True}, {}, True),
]
WRONG_REWARDS: list[tuple[dict[str, Any], str]] = [
    ({}, "rewards must be numbers by agent, or left out for a reward, got null."),
    ({"rewards": [1]}, "rewards must be numbers by agent"),
    ({"reward": 1, "rewards": {"a": 1}}, "rewards must be numbers by agent"),
    ({"reward": True}, "reward must be a number, got true."),
    ({"reward": "1"}, 'reward must be a number, got "1".'),
    ({"rewards": {"digger": None}}, "rewards.digger must be a number, got null."),
    ({"reward": 10**400}, "reward must be a number, got 1000"),
    ({"reward": 1, "end": 1}, "end must be true or false, got 1."),
    ({"reward": 1, "score": 2}, "score must be left out"),
]


def test_rewards_are_numbers_for_the_episode_or_by_agent(gateway: Gateway) -> None:
    for body, rewards, end in REWARDS:
        assert post(gateway, "/reward", body).status_code == 200
        assert gateway.session.rewards[-1] == (rewards, end)
    for body, text in WRONG_REWARDS:
        _, message = refusal(post(gateway, "/reward", body))
        assert message.startswith(text), message
    assert len(gateway.session.rewards) == len(REWARDS)


def test_addresses_that_are_not_served_are_refused_as_the_clients_provider_does(gateway: Gateway) -> None:
    for method, path, status in (("POST", "/v1/embeddings", 404), ("GET", CHAT, 405), ("PUT", "/x", 404)):
        response = httpx2.request(method, gateway.url + path, headers=gateway.headers)
        assert refusal(response, status)[1].startswith("There is nothing at this address for this method")
        claude = httpx2.request(method, gateway.url + path, headers={**gateway.headers, "anthropic-version": "1"})
        assert (claude.status_code, claude.json()["type"]) == (status, "error")


def test_wrong_key_is_refused_though_a_large_body_follows(gateway: Gateway) -> None:
    headers = {"x-api-key": gateway.sessions.key("quarry-2")}
    response = httpx2.post(gateway.url + CHAT, content=b" " * 2**24, headers=headers)
    assert refusal(response, 403)[1] == "The key must be this episode's, got another."


def test_no_key_is_written_anywhere(capfd: pytest.CaptureFixture[str]) -> None:
    with scripted_gateway() as gateway:
        gateway.session.says = RuntimeError("a mistake of ours")
        assert post(gateway, f"/v1/nothing?key={gateway.sessions.key()}", {}).status_code == 404
        assert post(gateway, CHAT, BODIES[CHAT]).status_code == 500
    written = "".join(capfd.readouterr())
    assert "a mistake of ours" in written
    assert gateway.sessions.key() not in written + repr(gateway.session.requests)


def test_server_ends_with_its_block_and_its_port_is_free_again() -> None:
    sessions = ScriptedSessions()
    with serving(create_app(sessions), host="127.0.0.1", port=0) as url:
        gateway = Gateway(url, sessions)
        with (
            serving(create_app(sessions), host="127.0.0.1", port=0) as other,
            pytest.raises(UserError, match=r"gateway\.host and gateway\.port must be free to listen on, got .*Errno"),
            serving(create_app(sessions), host="127.0.0.1", port=Gateway(other, sessions).port),
        ):
            pass
        with httpx2.Client(headers=gateway.headers) as client:
            assert client.get(f"{gateway.url}/v1/models").status_code == 200
    with serving(create_app(sessions), host="127.0.0.1", port=gateway.port) as again:
        assert again == url == f"http://127.0.0.1:{gateway.port}"


def test_server_says_an_address_that_clients_read_as_one() -> None:
    sessions = ScriptedSessions()
    with serving(create_app(sessions), host="::1", port=0) as url:
        gateway = Gateway(url, sessions)
        assert url == f"http://[::1]:{gateway.port}"
        assert httpx2.get(f"{gateway.url}/v1/models", headers=gateway.headers).status_code == 200


def test_client_that_hangs_up_within_its_body_is_not_our_mistake(capfd: pytest.CaptureFixture[str]) -> None:
    with scripted_gateway() as gateway:
        head = f"POST /e/{EPISODE}{CHAT} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {gateway.sessions.key()}\r\n"
        with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
            connection.sendall(f"{head}Content-Length: 9\r\nExpect: 100-continue\r\n\r\n".encode())
            assert connection.recv(99).startswith(b"HTTP/1.1 100 ")  # it reads
    assert "".join(capfd.readouterr()) == ""


def test_server_of_this_machine_answers_to_its_own_names_alone() -> None:
    sessions = ScriptedSessions()
    with serving(create_app(sessions), host="127.0.0.1", port=0, public_url="http://trainer.lan:80/a") as url:
        gateway = Gateway(url, sessions)

        def status(host: str) -> int:
            return httpx2.get(f"{gateway.url}/v1/models", headers={**gateway.headers, "host": host}).status_code

        assert [status(host) for host in ("localhost:1", f"127.0.0.1:{gateway.port}", "trainer.lan")] == [200] * 3
        assert [status(host) for host in ("evil.example", "lan", "localhost.evil:1")] == [400] * 3


@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_absent_extra_is_named_before_an_agent_asks(package: str) -> None:
    script = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from agentloop.errors import needing\n"
        "with needing('gateway', 'environment.agent'): import agentloop.gateway.endpoints"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == (
        "agentloop.errors.UserError: environment.agent must not be used without its extra (ModuleNotFoundError: "
        f"No module named {package!r}). Install it: pip install 'agentloop-replay[gateway]'."
    )
