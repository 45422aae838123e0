"""Engines that fail: nothing wrong is ever returned, each fault has its name, and every call ends in time."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentloop.engines import Completion, GenerationFailed, GenerationRequest
from agentloop.engines.remote.engine_client import EngineLimits, RemoteEngine
from agentloop.engines.remote.faults import ASKED_AGAIN, FaultKind
from agentloop.engines.remote.retries import read_retry_after
from agentloop.engines.remote.routes import CompletionsRoute
from agentloop.engines.remote.server_facts import ask_server, read_key
from agentloop.errors import UserError
from tests.fakes.engine_replies import replies_of
from tests.fakes.engine_sampling import plain_log_probs
from tests.fakes.engine_server import EngineServer, serving
from tests.fakes.engine_traps import Trap

KEY = "a-key-that-nobody-sees"
QUICK = EngineLimits(first_pause_s=0.01, proof_timeout_s=0.1, turn_timeout_s=20.0, restart_timeout_s=0.0)
VERSION = 5
REQUEST = GenerationRequest(3, [5, 9, 2, 70, 11], 12)

BY_EITHER_ROUTE = {
    Trap.BUSY: FaultKind.BUSY,
    Trap.SERVER_ERROR: FaultKind.SERVER_ERROR,
    Trap.CUT_BODY: FaultKind.CUT_BODY,
    Trap.PAGE: FaultKind.CUT_BODY,
    Trap.ABORT: FaultKind.ABORTED,
    Trap.PROMPT_TOKENS: FaultKind.PROMPT_TOKENS,
    Trap.FEWER_LOG_PROBS: FaultKind.LENGTHS,
    Trap.NO_LOG_PROBS: FaultKind.LENGTHS,
    Trap.OTHER_IDS: FaultKind.TOKEN_IDS,
    Trap.NAN: FaultKind.LOG_PROBS,
    Trap.MINUS_INFINITY: FaultKind.LOG_PROBS,
    Trap.POSITIVE: FaultKind.LOG_PROBS,
    Trap.UNKNOWN_LOG_PROB: FaultKind.LOG_PROBS,
    Trap.VOCABULARY: FaultKind.VOCABULARY,
    Trap.MAX_TOKENS_CUT: FaultKind.CUT_SHORT,
    Trap.TOO_MANY_TOKENS: FaultKind.TOO_MANY_TOKENS,
    Trap.OWN_STOP: FaultKind.FINISH_REASON,
}
BY_SPANS = {
    Trap.HOLE: FaultKind.VERSION_SPANS,
    Trap.OVERLAP: FaultKind.VERSION_SPANS,
    Trap.SHORT_SPANS: FaultKind.VERSION_SPANS,
    Trap.NO_SPANS: FaultKind.VERSION_SPANS,
    Trap.UNKNOWN_VERSION: FaultKind.UNPROVED_VERSION,
}
CASES = [
    *((trap, kind, route) for trap, kind in BY_EITHER_ROUTE.items() for route in ("generate", "completions")),
    *((trap, kind, "generate") for trap, kind in BY_SPANS.items()),
]


@pytest.fixture(scope="module")
def module_server(qwen2: Path) -> Iterator[EngineServer]:
    with serving(qwen2, key=KEY) as server:
        yield server


@pytest.fixture
def server(module_server: EngineServer) -> EngineServer:
    """Without end tokens of its own, so that every reply is as long as it may be."""
    module_server.traps.clear()
    module_server.models.restart()
    module_server.models.model.generation_config.eos_token_id = None
    module_server.models.label = str(VERSION)
    module_server.requests.clear()
    module_server.most_running = 0
    return module_server


def connected(
    server: EngineServer, route: str = "generate", *, stop_ids: frozenset[int] = frozenset(), **limits: Any
) -> RemoteEngine:
    facts = ask_server(server.address, model=None, key=KEY)
    server.requests.clear()
    if route == "completions":
        facts = replace(facts, route=CompletionsRoute())
    engine = RemoteEngine(
        [facts], key=KEY, stop_ids=stop_ids, vocab_size=server.models.vocabulary, limits=replace(QUICK, **limits)
    )
    engine.published(VERSION)
    return engine


def asked(engine: RemoteEngine, request: GenerationRequest = REQUEST) -> Completion | GenerationFailed:
    (reply,) = replies_of(engine, [request])
    return reply


def assert_good(
    server: EngineServer, reply: Completion | GenerationFailed, request: GenerationRequest = REQUEST
) -> None:
    assert isinstance(reply, Completion), reply
    own = plain_log_probs(server.models.model, request.prompt_ids, reply.token_ids)
    assert reply.log_probs == pytest.approx(own, abs=1e-3)
    assert (len(reply.token_ids), reply.policy_version) == (request.max_new_tokens, VERSION)


@pytest.mark.parametrize(("trap", "kind", "route"), CASES)
def test_a_wrong_answer_is_counted_by_name_and_never_returned(
    server: EngineServer, trap: Trap, kind: FaultKind, route: str
) -> None:
    engine = connected(server, route)
    server.traps.set(trap)
    failure = asked(engine)
    assert isinstance(failure, GenerationFailed)
    assert str(failure).startswith(f"{kind}: ")
    tries = 3 if kind in ASKED_AGAIN else 1
    assert engine.faults == {kind: tries}
    assert len(server.requests) == tries
    server.traps.clear()
    assert_good(server, asked(engine))


@pytest.mark.parametrize(("trap", "kind", "route"), [case for case in CASES if case[1] in ASKED_AGAIN])
def test_a_fault_that_passes_costs_a_second_try_and_no_episode(
    server: EngineServer, trap: Trap, kind: FaultKind, route: str
) -> None:
    engine = connected(server, route)
    server.traps.set(trap, 1)
    assert_good(server, asked(engine))
    assert engine.faults == {kind: 1}


def test_every_trap_is_sprung_by_some_test() -> None:
    apart = {Trap.SILENCE, Trap.OVER_STOP, Trap.OTHER_MODEL}
    assert {trap for trap, _, _ in CASES} | apart == set(Trap)


def test_tokens_after_a_stop_token_are_refused(server: EngineServer) -> None:
    engine = connected(server, stop_ids=frozenset({17}))
    server.traps.set(Trap.OVER_STOP)
    assert "tokens after the stop token 17" in str(asked(engine))
    assert engine.faults == {"finish_reason": 1}


@pytest.mark.parametrize("route", ["generate", "completions"])
def test_a_silent_server_costs_the_turn_its_deadline(server: EngineServer, route: str) -> None:
    engine = connected(server, route, turn_timeout_s=0.3)
    server.traps.set(Trap.SILENCE)
    began = time.monotonic()
    replies = replies_of(engine, [replace(REQUEST, episode=episode) for episode in range(8)])
    assert time.monotonic() - began < 10
    assert [str(reply) for reply in replies] == ["deadline: no reply within 0.3 s"] * 8
    assert engine.faults == {"deadline": 8}


def test_a_server_that_nobody_listens_on_fails_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UserError, match=f"engine.urls must answer, got ConnectError: .* from {url}"):
        ask_server(url, model=None, key=None)


@pytest.mark.parametrize("version", ["0.31.0", "0.9.2", "unknown"])
def test_a_server_of_an_older_vllm_is_refused_by_its_version(qwen2: Path, version: str) -> None:
    expected = rf"engine.urls must be of vLLM 0\.32 or newer, got {version} at http://127"
    with serving(qwen2) as server:
        server.version = version
        with pytest.raises(UserError, match=expected):
            ask_server(server.address, model=None, key=None)


def test_a_server_that_has_gone_costs_the_episode(qwen2: Path) -> None:
    with serving(qwen2, key=KEY) as server:
        engine = connected(server)
    assert str(asked(engine)).startswith("connection: ConnectError: ")
    assert engine.faults == {"connection": 3}


def test_another_engine_takes_over_the_turn(server: EngineServer, qwen2: Path) -> None:
    with serving(qwen2, key=KEY) as gone:
        facts = [ask_server(each.address, model=None, key=KEY) for each in (server, gone)]
    engine = RemoteEngine(facts, key=KEY, stop_ids=frozenset(), vocab_size=server.models.vocabulary, limits=QUICK)
    engine.published(VERSION)
    for reply in replies_of(engine, [replace(REQUEST, episode=episode) for episode in range(12)]):
        assert_good(server, reply)
    assert 1 <= engine.faults["connection"] < 12
    before = engine.faults["connection"]
    assert_good(server, replies_of(engine, [replace(REQUEST, episode=20)])[0])
    assert engine.faults["connection"] == before  # an engine that failed rests


def test_an_episode_asks_the_same_engine_in_every_turn(server: EngineServer, qwen2: Path) -> None:
    episodes = range(24)  # which engine one asks depends on the engines' ports: eight might all ask the same
    with serving(qwen2, key=KEY) as other:
        other.models.label = str(VERSION)
        facts = [ask_server(each.address, model=None, key=KEY) for each in (server, other)]
        engine = RemoteEngine(facts, key=KEY, stop_ids=frozenset(), vocab_size=server.models.vocabulary, limits=QUICK)
        engine.published(VERSION)
        first = [_asked_of(server, other, engine, episode) for episode in episodes]
        again = [_asked_of(server, other, engine, episode) for episode in episodes]
        engine.withdraw(other.address)
        alone = [_asked_of(server, other, engine, episode) for episode in episodes]
    assert first == again
    assert set(first) == {"server", "other"}
    assert alone == ["server"] * len(episodes)


def _asked_of(server: EngineServer, other: EngineServer, engine: RemoteEngine, episode: int) -> str:
    server.requests.clear()
    other.requests.clear()
    replies_of(engine, [GenerationRequest(episode, [1, 2], 1)])
    assert len(server.requests) + len(other.requests) == 1
    return "server" if server.requests else "other"


def test_a_turn_waits_for_an_engine_to_be_proved_until_its_deadline(server: EngineServer) -> None:
    engine = connected(server, turn_timeout_s=0.3)
    engine.withdraw(server.address)
    assert str(asked(engine)) == "deadline: no reply within 0.3 s"
    assert server.requests == []

    async def published_meanwhile() -> Completion:
        waiting = asyncio.create_task(engine.reply(REQUEST))
        await asyncio.sleep(0.1)
        engine.published(VERSION)
        try:
            return await waiting
        finally:
            await engine.close()

    assert_good(server, asyncio.run(published_meanwhile()))


def test_retry_after_is_waited_for(server: EngineServer) -> None:
    engine = connected(server)
    server.traps.retry_after = "1"
    server.traps.set(Trap.BUSY, 1)
    began = time.monotonic()
    assert_good(server, asked(engine))
    assert time.monotonic() - began >= 1.0


def test_retry_after_the_deadline_ends_the_turn_at_once(server: EngineServer) -> None:
    engine = connected(server)
    server.traps.retry_after = "3600"
    server.traps.set(Trap.BUSY)
    began = time.monotonic()
    failure = str(asked(engine))
    assert time.monotonic() - began < 10
    assert failure.startswith("busy: status 429: too many requests; the next try, in 3600.0 s, would miss")
    assert engine.faults == {"busy": 1}


def test_retry_after_is_seconds_or_a_date() -> None:
    assert read_retry_after("7") == 7.0
    assert read_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert (read_retry_after("Fri, 01 Jan 2100 00:00:00 GMT") or 0.0) > 1e6
    assert read_retry_after("soon") is None
    assert read_retry_after(None) is None


def test_no_more_turns_are_under_way_than_allowed(server: EngineServer) -> None:
    engine = connected(server, concurrency=3)
    server.models.pace_s = 0.005
    replies = replies_of(engine, [replace(REQUEST, episode=episode) for episode in range(12)])
    server.models.pace_s = 0.0
    for reply in replies:
        assert_good(server, reply)
    assert server.most_running == 3


def test_unknown_settings_are_not_sent(server: EngineServer) -> None:
    asked(connected(server))
    (body,) = server.requests
    assert body.keys() == {"model", "token_ids", "sampling_params"}
    assert body["sampling_params"] == {
        "temperature": 1.0,
        "max_tokens": 12,
        "stop_token_ids": [],
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "detokenize": False,
    }


def test_a_server_without_scale_out_routes_is_asked_by_completions(server: EngineServer) -> None:
    server.scale_out = False
    try:
        engine = RemoteEngine.connect(
            [server.address], key=KEY, stop_ids=frozenset(), vocab_size=server.models.vocabulary, limits=QUICK
        )
        engine.published(VERSION)
        assert_good(server, asked(engine))
        assert server.requests[-1].keys() >= {"prompt", "return_tokens_as_token_ids"}
    finally:
        server.scale_out = True


def test_an_engine_that_restarted_with_its_first_weights_is_refused(server: EngineServer) -> None:
    engine = connected(server)
    server.models.restart()
    server.models.model.generation_config.eos_token_id = None
    assert "tokens of weights 'default', for which the engine has not been proved" in str(asked(engine))
    assert engine.faults == {"unproved_version": 3}


def test_turns_wait_for_an_engine_that_restarts_and_lose_no_try(server: EngineServer) -> None:
    engine = connected(server, restart_timeout_s=60.0)
    server.models.label = "default"

    async def proved_meanwhile() -> Completion:
        turn = asyncio.create_task(engine.reply(REQUEST))
        while engine.faults["unproved_version"] < 4:
            await asyncio.sleep(0.005)
        server.models.label = str(VERSION)
        try:
            return await turn
        finally:
            await engine.close()

    assert_good(server, asyncio.run(proved_meanwhile()))


def test_an_engine_that_stays_gone_is_given_up_once_for_all_turns(qwen2: Path) -> None:
    with serving(qwen2, key=KEY) as server:
        engine = connected(server, restart_timeout_s=0.5)
    began = time.monotonic()
    first, second = (str(asked(engine)) for _ in range(2))
    assert first.startswith("connection: ") and second.startswith("connection: ")
    assert time.monotonic() - began >= 0.5
    before = engine.faults["connection"]
    asked(engine)
    assert engine.faults["connection"] == before + 3


def test_an_engine_that_was_gone_is_not_asked_again_unproved_where_the_route_names_no_versions(qwen2: Path) -> None:
    with serving(qwen2, key=KEY) as server:
        engine = connected(server, "completions", turn_timeout_s=0.5)
        port = server.port
    assert str(asked(engine)).startswith("deadline: no reply within 0.5 s; before it, connection: ")
    with serving(qwen2, key=KEY, port=port) as server:
        server.models.model.generation_config.eos_token_id = None
        assert str(asked(engine)) == "deadline: no reply within 0.5 s"
        engine.published(VERSION + 1)
        (reply,) = replies_of(engine, [REQUEST])
        assert isinstance(reply, Completion), reply
        assert reply.policy_version == VERSION + 1


def test_the_name_that_a_restarted_engine_gives_its_weights_proves_nothing(server: EngineServer) -> None:
    with pytest.raises(ValueError, match="label must not be 'default'"):
        connected(server).published(6, label="default")


def test_a_label_names_one_version(server: EngineServer) -> None:
    with pytest.raises(ValueError, match="'5' must name one version, got 6 after 5"):
        connected(server).published(6, label="5")


def test_nothing_is_sampled_before_a_publish(server: EngineServer) -> None:
    engine = RemoteEngine.connect(
        [server.address],
        key=KEY,
        stop_ids=frozenset(),
        vocab_size=server.models.vocabulary,
        limits=replace(QUICK, turn_timeout_s=0.2),
    )
    with pytest.raises(RuntimeError, match="must come before anything is sampled"):
        _ = engine.policy_version
    assert str(asked(engine)) == "deadline: no reply within 0.2 s"


def test_the_key_is_in_no_message(server: EngineServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    engine = connected(server)
    replies = [asked(engine)]
    server.key = "another"
    replies.append(asked(engine))
    server.key = KEY
    server.traps.set(Trap.CUT_BODY)
    replies.append(asked(engine))
    assert str(replies[1]) == 'refused: status 401: {"error":"Unauthorized"}'
    assert engine.faults == {"refused": 1, "cut_body": 3}
    assert KEY not in "".join([repr(engine), caplog.text, *map(repr, replies)])


def test_a_key_with_a_space_is_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "one two")
    with pytest.raises(UserError) as refused:
        read_key("ENGINE_KEY")
    assert str(refused.value).startswith("ENGINE_KEY must be letters, digits and signs without a space.")
    assert "two" not in str(refused.value)
    monkeypatch.setenv("ENGINE_KEY", f" {KEY}\n")
    assert read_key("ENGINE_KEY") == KEY
    monkeypatch.delenv("ENGINE_KEY")
    assert read_key("ENGINE_KEY") is None


def test_batches_of_several_event_loops_leave_no_connection_behind(server: EngineServer) -> None:
    engine = connected(server)
    for _ in range(3):
        assert_good(server, asked(engine))
    gc.collect()  # a connection left open would warn here, and a warning of an object's end fails no test by itself


def test_a_cancelled_turn_frees_its_place(server: EngineServer) -> None:
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
