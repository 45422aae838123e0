"""Weights that change while replies are sampled: each token has the version that sampled it, or there is no reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx2
import pytest
import torch

from agentloop.engines import Completion, GenerationRequest
from agentloop.engines.remote.engine_client import EngineLimits, RemoteEngine
from agentloop.engines.remote.server_facts import ask_server
from tests.fakes.engine_sampling import load, plain_log_probs
from tests.fakes.engine_server import EngineServer, serving

LONG = GenerationRequest(0, [5, 9, 2, 70, 11], 120)


@pytest.fixture(scope="module")
def module_server(qwen2: Path) -> Iterator[EngineServer]:
    with serving(qwen2) as server:
        server.models.pace_s = 0.002
        yield server


@pytest.fixture
def server(module_server: EngineServer) -> EngineServer:
    module_server.models.restart()
    module_server.models.model.generation_config.eos_token_id = None
    module_server.models.label = "1"
    return module_server


@pytest.fixture(scope="module")
def next_weights(qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = tmp_path_factory.mktemp("weights") / "2", load(qwen2)
    torch.manual_seed(2)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


def connected(server: EngineServer) -> RemoteEngine:
    servers = [ask_server(server.address, key=None)]
    limits = EngineLimits(first_pause_s=0.01, proof_timeout_s=5.0, turn_timeout_s=20.0)
    size = server.models.vocabulary
    engine = RemoteEngine(servers, key=None, stop_ids=frozenset(), vocab_size=size, limits=limits)
    engine.published(1)
    return engine


async def posted(server: EngineServer, *asked: tuple[str, object]) -> None:
    async with httpx2.AsyncClient(base_url=server.address) as client:
        for path, body in asked:
            (await client.post(path, json=body)).raise_for_status()


async def reloaded(server: EngineServer, folder: Path, label: str) -> None:
    """What a publish does to a server: stop between two tokens, other weights, their name, go on."""
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    steps = [("/collective_rpc", reload), ("/update_weight_version", {"new_version": label}), ("/resume", None)]
    await posted(server, ("/pause?mode=keep", None), *steps)


def meanwhile(server: EngineServer, engine: RemoteEngine, publish: Callable[[], Awaitable[None]]) -> Completion:
    """The reply to a long request during which `publish` happens."""

    async def both() -> Completion:
        turn = asyncio.create_task(engine.reply(LONG))
        while not server.models.running:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.03)
        await publish()
        try:
            return await turn
        finally:
            await engine.close()

    return asyncio.run(both())


def test_each_token_of_a_reply_over_a_publish_has_its_own_version(
    server: EngineServer, next_weights: Path, qwen2: Path
) -> None:
    engine = connected(server)

    async def publish() -> None:
        await reloaded(server, next_weights, "2")
        await asyncio.sleep(0.3)  # the proof may end after the reply
        engine.published(2)

    reply = meanwhile(server, engine, publish)
    assert isinstance(reply.policy_version, tuple)
    first = reply.policy_version.count(1)
    assert reply.policy_version == (1,) * first + (2,) * (120 - first)
    assert 0 < first < 120
    old, new = (plain_log_probs(load(folder), LONG.prompt_ids, reply.token_ids) for folder in (qwen2, next_weights))
    assert reply.log_probs == pytest.approx([*old[:first], *new[first:]], abs=1e-3)
    assert reply.log_probs != pytest.approx(old, abs=1e-2)
    assert engine.faults == {}


def test_a_reply_that_a_pause_aborts_is_asked_again(server: EngineServer) -> None:
    engine = connected(server)
    reply = meanwhile(server, engine, lambda: posted(server, ("/pause?mode=abort", None), ("/resume", None)))
    assert (len(reply.token_ids), engine.faults) == (120, {"aborted": 1})
