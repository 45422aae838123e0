"""Engines that fail: nothing wrong is ever returned, each fault has its name, and every call ends in time."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from agentloop.engines import Completion, GenerationFailed, GenerationRequest
from agentloop.engines.remote.engine_client import EngineLimits, RemoteEngine
from agentloop.engines.remote.server_facts import ask_server, read_key
from agentloop.engines.remote.vllm_protocol import RETRIED_FAULTS, FaultKind
from agentloop.errors import UserError
from replay.storage.collecting.ticket_records import PUBLISHING, SERVING, Participant
from tests.fakes.engine_sampling import load, plain_log_probs, replies_of
from tests.fakes.engine_server import EngineServer, serving
from tests.fakes.engine_traps import Trap

KEY = "a-key-that-nobody-sees"
QUICK = EngineLimits(first_pause_s=0.01, proof_timeout_s=0.1, turn_timeout_s=20.0, restart_timeout_s=0.0)
VERSION = 5
REQUEST = GenerationRequest(3, [5, 9, 2, 70, 11], 12)
LONG = replace(REQUEST, max_new_tokens=120)
MANY = [replace(REQUEST, episode=episode) for episode in range(12)]
FAULTS = {
    Trap.BUSY: FaultKind.BUSY,
    Trap.SERVER_ERROR: FaultKind.SERVER_ERROR,
    Trap.CUT_BODY: FaultKind.CUT_BODY,
    Trap.PAGE: FaultKind.CUT_BODY,
    Trap.ABORT: FaultKind.ABORTED,
    Trap.PROMPT_TOKENS: FaultKind.WRONG_REPLY,
}


@pytest.fixture(scope="module")
def servers(qwen2: Path) -> Iterator[tuple[EngineServer, EngineServer]]:
    with serving(qwen2, key=KEY) as first, serving(qwen2, key=KEY) as second:
        yield first, second


@pytest.fixture
def both(servers: tuple[EngineServer, EngineServer]) -> tuple[EngineServer, EngineServer]:
    """Without end tokens of their own, so that every reply is as long as it may be."""
    for server in servers:
        server.traps.clear()
        server.models.restart()
        server.models.model.generation_config.eos_token_id = None
        server.models.label = str(VERSION)
        server.models.pace_s = 0.0
        server.requests.clear()
    return servers


@pytest.fixture
def server(both: tuple[EngineServer, EngineServer]) -> EngineServer:
    return both[0]


def connected(*servers: EngineServer, **limits: Any) -> RemoteEngine:
    facts = [ask_server(server.address, key=KEY) for server in servers]
    for server in servers:
        server.requests.clear()
    size = servers[0].models.vocabulary
    engine = RemoteEngine(facts, key=KEY, stop_ids=frozenset(), vocab_size=size, limits=replace(QUICK, **limits))
    engine.published(VERSION)
    return engine


def asked(engine: RemoteEngine, request: GenerationRequest = REQUEST) -> Completion | GenerationFailed:
    (reply,) = replies_of(engine, [request])
    return reply


def assert_good(server: EngineServer, *replies: Completion | GenerationFailed) -> None:
    for reply in replies:
        assert isinstance(reply, Completion), reply
        own = plain_log_probs(server.models.model, REQUEST.prompt_ids, reply.token_ids)
        assert reply.log_probs == pytest.approx(own, abs=1e-3)
        assert (len(reply.token_ids), reply.policy_version) == (REQUEST.max_new_tokens, VERSION)


def reply_while(engine: RemoteEngine, meanwhile: Any, request: GenerationRequest = REQUEST) -> Completion:
    """The reply to a request that is under way while `meanwhile()` happens."""

    async def both() -> Completion:
        turn = asyncio.create_task(engine.reply(request))
        try:
            await meanwhile()
            return await turn
        finally:
            await engine.close()

    return asyncio.run(both())


@pytest.mark.parametrize(("trap", "kind"), FAULTS.items())
def test_passing_faults_cost_a_try_and_lasting_ones_the_turn(server: EngineServer, trap: Trap, kind: FaultKind) -> None:
    engine = connected(server)
    server.traps.set(trap)
    failure = asked(engine)
    assert isinstance(failure, GenerationFailed) and str(failure).startswith(f"{kind}: ")
    tries = 3 if kind in RETRIED_FAULTS else 1
    assert (engine.faults, len(server.requests)) == ({kind: tries}, tries)
    server.traps.set(trap, 1 if kind in RETRIED_FAULTS else 0)
    assert_good(server, asked(engine))
    assert engine.faults == {kind: tries + (kind in RETRIED_FAULTS)}


def test_a_silent_server_costs_the_turn_its_deadline(server: EngineServer) -> None:
    engine = connected(server, turn_timeout_s=0.3)
    server.traps.set(Trap.SILENCE)
    assert [str(reply) for reply in replies_of(engine, MANY)] == ["deadline: no reply within 0.3 s"] * 12
    assert engine.faults == {"deadline": 12}


def test_server_that_is_unfit_for_the_run_is_refused(server: EngineServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UserError, match=f"engine.urls must answer, got ConnectError: .* from {url}"):
        ask_server(url, key=None)
    with pytest.raises(UserError, match="engine.urls must name vLLM servers, got no list of models .status 404. from "):
        ask_server(f"{server.address}/nowhere", key=KEY)
    with pytest.raises(UserError, match="must name servers of nobody, got tiny from "):
        ask_server(server.address, model="nobody", key=KEY)
    for version in ("0.31.0", "0.9.2", "unknown"):
        server.version = version
        with pytest.raises(UserError, match=rf"engine.urls must be of vLLM 0\.32 or newer, got {version} at http://1"):
            ask_server(server.address, key=KEY)
    server.version = "0.32.0"
    server.scale_out = False
    with pytest.raises(UserError, match="engine.urls must say which weights sampled .* got status 403 .*--enable-sca"):
        ask_server(server.address, key=KEY)
    server.scale_out = True


def test_another_engine_takes_over_the_turns_of_one_that_has_gone(both: tuple[EngineServer, EngineServer]) -> None:
    with serving(both[0].models.folder, key=KEY) as gone:
        engine, alone = connected(both[0], gone), connected(gone, restart_timeout_s=0.5)
    assert str(asked(alone)).startswith("connection: ConnectError: ")
    tries = alone.faults["connection"]
    asked(alone)
    assert alone.faults["connection"] == tries + 3  # it is given up once for all turns
    assert_good(both[0], *replies_of(engine, MANY))
    before = engine.faults["connection"]
    assert 1 <= before < 12
    assert_good(both[0], asked(engine, replace(REQUEST, episode=20)))
    assert engine.faults["connection"] == before  # an engine that failed rests


def test_an_episode_asks_the_same_engine_in_every_turn(both: tuple[EngineServer, EngineServer]) -> None:
    engine = connected(*both)
    episodes = range(24)  # which engine one asks depends on the engines' ports: eight might all ask the same

    def asked_of(episode: int) -> int:
        before = len(both[0].requests)
        replies_of(engine, [GenerationRequest(episode, [1, 2], 1)])
        return len(both[0].requests) - before

    first, again = ([asked_of(episode) for episode in episodes] for _ in range(2))
    engine.withdraw(both[1].address)
    assert (first, set(first)) == (again, {0, 1})
    assert [asked_of(episode) for episode in episodes] == [1] * 24


def test_only_an_engine_that_the_learner_lists_as_serving_is_asked(both: tuple[EngineServer, EngineServer]) -> None:
    engine = connected(*both)

    def listed(server: EngineServer, version: int, state: str = SERVING) -> Participant:
        server.models.label = f"run@{version}"
        facts = {"version": version, "label": f"run@{version}", "adapter": None, "state": state}
        return Participant(server.address, facts, 1.0, 0.1)

    def versions() -> set[object]:
        return {reply.policy_version for reply in replies_of(engine, MANY) if isinstance(reply, Completion)}

    engine.use_listed([listed(both[0], 3), listed(both[1], 4)])
    assert versions() == {3, 4}
    before = len(both[1].requests)
    for second in ([listed(both[1], 5, PUBLISHING)], []):
        engine.use_listed([listed(both[0], 3), *second])
        assert versions() == {3}
    assert len(both[1].requests) == before
    engine.use_listed([replace(listed(both[0], 3), id="http://elsewhere:1")])
    assert not engine.serves


def test_a_turn_waits_for_an_engine_to_be_proved_until_its_deadline(server: EngineServer) -> None:
    engine = connected(server, turn_timeout_s=0.3)
    engine.withdraw(server.address)
    assert str(asked(engine)) == "deadline: no reply within 0.3 s"
    assert server.requests == []
    engine = connected(server)
    engine.withdraw(server.address)

    async def publish() -> None:
        await asyncio.sleep(0.1)
        engine.published(VERSION)

    assert_good(server, reply_while(engine, publish))


def test_settings_that_vllm_does_not_know_are_not_sent(server: EngineServer) -> None:
    asked(connected(server))
    (body,) = server.requests
    assert body.keys() == {"model", "token_ids", "sampling_params"}
    whole = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    whole |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    asked_for = {"max_tokens": 12, "stop_token_ids": [], "logprobs": 0, "detokenize": False}
    assert body["sampling_params"] == whole | asked_for


def test_turns_wait_for_an_engine_that_restarts_and_lose_no_try(server: EngineServer) -> None:
    server.models.label = "default"
    engine = connected(server, restart_timeout_s=60.0)

    async def prove() -> None:
        while engine.faults["unproved_version"] < 4:
            await asyncio.sleep(0.005)
        server.models.label = str(VERSION)

    assert_good(server, reply_while(engine, prove))


def test_key_is_secret(server: EngineServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.DEBUG)
    engine = connected(server)
    server.key = "another"
    refused = asked(engine)
    with pytest.raises(UserError, match="AGENTLOOP_ENGINE_KEY must hold the engine's key, got status 401") as unknown:
        ask_server(server.address, key=KEY)
    server.key = KEY
    server.traps.set(Trap.CUT_BODY)
    replies = [refused, asked(engine)]
    assert str(refused) == 'refused: status 401: {"error":"Unauthorized"}'
    assert engine.faults == {"refused": 1, "cut_body": 3}
    assert KEY not in "".join([repr(engine), caplog.text, str(unknown.value), *map(repr, replies)])
    monkeypatch.setenv("AGENTLOOP_ENGINE_KEY", "one two")
    with pytest.raises(
        UserError, match=r"^AGENTLOOP_ENGINE_KEY must be letters, digits and signs without a space\."
    ) as spaced:
        read_key()
    assert "two" not in str(spaced.value)
    monkeypatch.setenv("AGENTLOOP_ENGINE_KEY", f" {KEY}\n")
    assert read_key() == KEY
    monkeypatch.delenv("AGENTLOOP_ENGINE_KEY")
    assert read_key() is None


def test_a_cancelled_turn_frees_its_place(server: EngineServer) -> None:
    server.models.pace_s, server.most_running = 0.005, 0
    assert_good(server, *replies_of(connected(server, concurrency=3), MANY))
    assert server.most_running == 3  # no more turns are under way than allowed
    engine = connected(server, concurrency=1)

    async def cancelled_then_asked() -> Completion:
        server.traps.set(Trap.SILENCE, 1)
        turn = asyncio.create_task(engine.reply(REQUEST))
        while server.traps.is_set(Trap.SILENCE):
            await asyncio.sleep(0.005)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        try:
            return await engine.reply(REQUEST)
        finally:
            await engine.close()

    assert_good(server, asyncio.run(cancelled_then_asked()))
    assert engine.faults == {}


@pytest.fixture(scope="module")
def next_weights(qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = tmp_path_factory.mktemp("weights") / "next", load(qwen2)
    torch.manual_seed(2)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


async def posted(server: EngineServer, *asked: tuple[str, object]) -> None:
    """Between two tokens of a long reply."""
    while not server.models.running:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.03)
    async with httpx2.AsyncClient(base_url=server.address) as client:
        for path, body in asked:
            (await client.post(path, json=body)).raise_for_status()


def test_each_token_over_a_publish_has_its_own_version(server: EngineServer, next_weights: Path, qwen2: Path) -> None:
    engine = connected(server, proof_timeout_s=5.0)
    server.models.pace_s = 0.002
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(next_weights)}}
    steps = [("/collective_rpc", reload), ("/update_weight_version", {"new_version": "next"}), ("/resume", None)]

    async def publish() -> None:
        await posted(server, ("/pause?mode=keep", None), *steps)
        await asyncio.sleep(0.3)  # the proof may end after the reply
        engine.published(VERSION + 1, label="next")

    reply = reply_while(engine, publish, LONG)
    assert isinstance(reply.policy_version, tuple)
    first = reply.policy_version.count(VERSION)
    assert reply.policy_version == (VERSION,) * first + (VERSION + 1,) * (120 - first)
    assert 0 < first < 120
    old, new = (plain_log_probs(load(folder), LONG.prompt_ids, reply.token_ids) for folder in (qwen2, next_weights))
    assert reply.log_probs == pytest.approx([*old[:first], *new[first:]], abs=1e-3)
    assert reply.log_probs != pytest.approx(old, abs=1e-2)
    assert engine.faults == {}
