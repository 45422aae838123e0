"""What official clients send back goes on from the tokens that were sampled, in every protocol."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import pytest

from agentloop.gateway.agent_request import AgentRequest
from agentloop.gateway.agent_sessions import AgentSession, Policy
from agentloop.gateway.endpoints import create_app
from agentloop.gateway.server_thread import serving
from agentloop.records import Completion
from context import TrainingControl, choose_parser, default_authors
from context.tokens.session_nodes import Status, segments_of
from tests.agentloop.gateway.test_official_clients import ASKS, QUESTION
from tests.fakes.agent_sessions import EPISODE, Gateway, ScriptedSessions
from tests.fakes.families import family
from tests.fakes.random_agents import PARSERS

TEXTS = ["  It is\u2028 78. ", "<think>\nWhere?\n</think>\n\nI look.\n", "", "It is coral."]


class RealSessions(ScriptedSessions):
    """One session that is stored nowhere, of a policy that says `texts` one after the other."""

    def __init__(self, name: str, texts: Sequence[str]) -> None:
        super().__init__()
        model, rest = family(name), list(texts)
        parser = choose_parser(PARSERS[name], model.template)

        async def ask(_: AgentRequest, line: int, prompt_ids: Sequence[int], most: int) -> Completion:
            ids = (*model.codec.encode(rest.pop(0)), model.end_id)
            return Completion(ids, (-0.5,) * len(ids), 0)

        policy = Policy(model.renderer(), lambda tools: parser, TrainingControl(), 4096, 256)
        self.real = AgentSession(EPISODE, policy, ask, now=datetime(2026, 1, 1))

    async def authorize(self, episode: str, key: str) -> AgentSession:
        self._keys.check(episode, key)
        return self.real


@pytest.mark.parametrize("name", ["chatml", "llama3"])
@pytest.mark.parametrize("protocol", ASKS)
def test_replies_that_come_back_are_the_tokens_that_were_sampled(protocol: str, name: str) -> None:
    call = family(name).call
    texts = [*TEXTS, call, *([f"I look.\n{call}\n{call}"] if name == "chatml" else [])]
    sessions = RealSessions(name, [*texts, "Done."])
    with serving(create_app(sessions), host="127.0.0.1", port=0) as port:
        gateway, said = Gateway(port, sessions), []
        for turn in range(len(texts) + 1):
            _, reply = ASKS[protocol](gateway, said, stream=bool(turn % 2))
            said += [*reply, QUESTION]
    nodes = sessions.real.tree.nodes
    assert [node.place.fork for node in nodes[1:]] == [None] * len(texts)
    assert {node.status for node in nodes} == {Status.TRAINED}
    assert len(segments_of(nodes, default_authors())) == 1
