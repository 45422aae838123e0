"""Whom a worker asks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentloop.engines import Completion, GenerationRequest
from agentloop.engines.remote.engine_client import RemoteEngine
from agentloop.engines.remote.server_facts import ask_server
from agentloop.workers.listed_engines import ListedEngines
from replay.storage.collecting.ticket_records import Participant
from tests.fakes.engine_sampling import replies_of
from tests.fakes.engine_server import EngineServer, serving


@pytest.fixture(scope="module")
def servers(qwen2: Path) -> Iterator[tuple[EngineServer, EngineServer]]:
    with serving(qwen2) as one, serving(qwen2) as other:
        yield one, other


def connected(servers: tuple[EngineServer, EngineServer]) -> RemoteEngine:
    facts = [ask_server(server.address, key=None) for server in servers]
    models = servers[0].models
    stop_ids = frozenset(models.model.generation_config.eos_token_id)  # type: ignore[arg-type, union-attr]
    return RemoteEngine(facts, key=None, stop_ids=stop_ids, vocab_size=models.vocabulary)


def reported(server: EngineServer, version: int, state: str = "serving") -> Participant:
    server.models.label = f"run@{version}"
    facts = {"version": version, "label": f"run@{version}", "adapter": None, "state": state}
    return Participant(server.address, facts, 1.0, 0.1)


def replies(engine: RemoteEngine, count: int) -> list[Completion]:
    found = replies_of(engine, [GenerationRequest(n, [5, 9, 2], 2) for n in range(count)])
    return [reply for reply in found if isinstance(reply, Completion)]


def test_only_the_engine_that_is_not_published_to_is_asked(servers: tuple[EngineServer, EngineServer]) -> None:
    engine = connected(servers)
    listed = ListedEngines(engine)
    assert not listed.any_serves
    listed.update([reported(servers[0], 3), reported(servers[1], 4)])
    assert {reply.policy_version for reply in replies(engine, 12)} == {3, 4}
    listed.update([reported(servers[0], 3), reported(servers[1], 5, "publishing")])
    before = len(servers[1].requests)
    assert {reply.policy_version for reply in replies(engine, 12)} == {3}
    assert len(servers[1].requests) == before
    listed.update([reported(servers[0], 3)])
    assert {reply.policy_version for reply in replies(engine, 12)} == {3}
    listed.update(
        [Participant("http://elsewhere:1", {"version": 1, "label": "a", "adapter": None, "state": "serving"}, 1, 1)]
    )
    assert not listed.any_serves
