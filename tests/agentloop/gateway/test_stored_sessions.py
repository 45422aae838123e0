"""Nothing is given to an agent that is not stored, and what it goes on from was given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from agentloop.gateway.agent_request import AgentRequest
from agentloop.gateway.agent_sessions import AgentSession, Policy, StoredNodes
from agentloop.gateway.node_writer import NodeWriter
from agentloop.records import Completion
from context import Message, TrainingControl, choose_parser
from replay.storage.sessions import OpenSession
from tests.fakes.families import family
from tests.fakes.random_agents import PARSERS, TODAY
from tests.fakes.records import RUN, new_store


def request(*messages: Message) -> AgentRequest:
    return AgentRequest("policy", "", False, messages, [], None, False, (), {})


@pytest.mark.parametrize("is_new", [False, True], ids=["asked again", "asked for more"])
def test_a_reply_that_could_not_be_stored_is_stored_before_anything_is_given(tmp_path: Path, is_new: bool) -> None:
    model = family("chatml")
    parser = choose_parser(PARSERS["chatml"], model.template)
    ids = (*model.codec.encode("It is coral."), model.end_id)
    sampled = []

    async def ask(_: AgentRequest, line: int, prompt_ids: Sequence[int], most: int) -> Completion:
        sampled.append(line)
        return Completion(ids, (-0.5,) * len(ids), 0)

    async def play() -> None:
        session = AgentSession("s", policy, ask, now=TODAY, stored=StoredNodes(writer))
        first, more = Message("user", "Where?"), (Message("assistant", "It is coral."), Message("user", "Sure?"))
        with pytest.raises(Exception, match=r"(?i)foreign key"):  # the session is not there
            await session.reply(request(first), asyncio.Future())
        store.sessions.open(OpenSession("s", RUN, TODAY.isoformat()))
        reply = await session.reply(request(first, *more) if is_new else request(first), asyncio.Future())
        assert (reply.message.content, len(sampled)) == ("It is coral.", 1 + is_new)

    policy = Policy(model.renderer(), lambda tools: parser, TrainingControl(), 4096, 256)
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        writer = NodeWriter(store.sessions)
        asyncio.run(play())
        writer.close()
        found = [(node.messages[-1].content, node.status) for node in store.sessions.nodes("s")]
    assert found == [("It is coral.", "trained" if number < is_new else "undelivered") for number in range(1 + is_new)]
