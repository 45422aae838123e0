"""Random agents ask over HTTP by official clients: what they were given is what is stored, and is what is trained."""

import asyncio
import random
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from agentloop.gateway.agent_request import AgentRequest
from agentloop.gateway.agent_sessions import Policy
from agentloop.gateway.endpoints import create_app
from agentloop.gateway.episode_keys import SharedKey
from agentloop.gateway.recorded_sessions import RecordedSessions, Recording
from agentloop.gateway.run_gateway import serving
from agentloop.records import Completion
from context import Message, TrainingControl, choose_parser
from context.tokens.session_nodes import conversation_of
from replay.storage.databases import Location
from replay.store import ReplayStore
from tests.context.test_conversation_tree import SOAK, check
from tests.fakes.families import Family, family
from tests.fakes.random_agents import PARSERS, RandomAgent, RandomSession, SampledReply, sampled_reply, tree_of
from tests.fakes.random_clients import RandomClients
from tests.fakes.records import RUN, new_store, sql

KEY = "the-agents-secret"


def plain(message: Message) -> tuple[Any, ...]:
    """What a message says, by whatever ids, and without what an agent adds to calls that it was given."""
    calls = [
        (call.name, {name: value for name, value in call.arguments.items() if name != "by_default"})
        for call in message.tool_calls
    ]
    return message.role, message.content, message.reasoning or None, calls


@dataclass
class RandomPolicy:
    """Says whatever a policy may say, each request by its number; some of them only once they are let go."""

    model: Family
    rng: random.Random
    sampled: dict[str, SampledReply] = field(default_factory=dict)
    asked: dict[bytes, Sequence[Message]] = field(default_factory=dict)
    """Conversations by the log-probs of their replies."""
    held: dict[str, tuple[threading.Event, threading.Event]] = field(default_factory=dict)
    """Of requests by number: set once it is asked, and once it may be answered."""

    async def ask(self, request: AgentRequest, line: int, prompt_ids: Sequence[int], most: int) -> Completion:
        number = str(next(iter(request.body["metadata"].values())))
        if number in self.held:
            asked, free = self.held[number]
            asked.set()
            await asyncio.to_thread(free.wait)
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        assert number not in self.sampled
        said = self.sampled[number] = sampled_reply(self.rng, self.model, prompt_ids, len(self.sampled))
        self.asked[np.float32(said.log_probs).tobytes()] = request.messages
        return Completion(tuple(said.token_ids), tuple(said.log_probs), said.version)


@dataclass
class PlayedSession:
    """What an agent asked and was given in one episode."""

    policy: RandomPolicy
    clients: RandomClients
    rng: random.Random
    name: str
    given: dict[int, Message] = field(default_factory=dict)
    """Replies by their nodes."""
    asides: set[int] = field(default_factory=set)
    asked: int = 0

    @property
    def sampled(self) -> list[SampledReply]:
        return [said for number, said in self.policy.sampled.items() if number.split("-")[0] == self.name]

    async def play(self) -> None:
        agent = RandomAgent(self.rng)
        for _ in range(self.rng.randint(1, 8)):
            requests = [agent.request() for _ in range(self.rng.choice([1, 1, 2, 3]))]
            if self.rng.random() < 0.1:
                requests.append(requests[0])  # two samples of one prompt
            answers = await asyncio.gather(*(self._answer(messages, tools) for messages, tools, _ in requests))
            for (messages, _, number), (reply, is_refused) in zip(requests, answers, strict=True):
                if agent.conversations[number] == messages:
                    agent.conversations[number] += [reply] if reply else []
                    if is_refused:
                        agent.forget(number)
        while self.policy.held.keys() - self.policy.sampled.keys():
            await asyncio.sleep(0.002)  # until nobody's reply is there, too
        await self.clients.settled()

    async def _answer(self, messages: list[Message], tools: Any) -> tuple[Message | None, bool]:
        """What the agent is given, if it waits for it; and whether its conversation can't be answered."""
        ask, stream = self.rng.choice(self.clients.asks), self.rng.random() < 0.5
        model = self.rng.choice([*["policy/digger"] * 9, "aside"])
        gives_up, comes_back = self.rng.random() < 0.12, self.rng.random() < 0.5
        self.asked += 1
        number = f"{self.name}-{self.asked}"
        try:
            given: Any = {"model": model, "stream": stream, "metadata": {"number": number}}
            waiting = asyncio.ensure_future(ask(messages, tools, **given))
            if gives_up and model != "aside" and await self._given_up(number, waiting):
                if not comes_back:
                    return None, False
                given["metadata"] = {"number": f"{number}-again"}
                waiting = asyncio.ensure_future(ask(messages, tools, **given))
            id, said = await waiting
        except (openai.BadRequestError, anthropic.BadRequestError):
            return None, True
        self.given[node := int(id[-4:])] = said
        if model == "aside":
            self.asides.add(node)
        return said, False

    async def _given_up(self, number: str, waiting: asyncio.Future[Any]) -> bool:
        """Whether the policy was asked, and the agent then left; what it says is there before long."""
        is_asked, is_free = self.policy.held[number] = threading.Event(), threading.Event()
        while not (waiting.done() or is_asked.is_set()):
            await asyncio.sleep(0.001)
        if waiting.done():  # it is refused, or given what another agent had left
            del self.policy.held[number]
            return False
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await self.clients.settled()
        asyncio.get_running_loop().call_later(0.005 * self.rng.random(), is_free.set)
        return True


async def play_all(url: str, policy: RandomPolicy, seeds: Sequence[int]) -> list[PlayedSession]:
    """Four sessions at a time, and the end of each."""

    async def play(seed: int) -> PlayedSession:
        clients = RandomClients(f"{url}/e/{seed}", KEY)
        played = PlayedSession(policy, clients, random.Random(seed), str(seed))
        await played.play()
        assert await clients.end() == bool(played.given.keys() - played.asides)
        return played

    fours = [seeds[first : first + 4] for first in range(0, len(seeds), 4)]
    return [played for four in fours for played in await asyncio.gather(*map(play, four))]


def check_seeds(location: Location, name: str, seeds: range) -> None:
    model, mine = family(name), [seed for seed in seeds if seed % len(PARSERS) == list(PARSERS).index(name)]
    parser, policy = choose_parser(PARSERS[name], model.template), RandomPolicy(model, random.Random(seeds[0]))
    limits = Policy(model.renderer(), lambda tools: parser, TrainingControl(), 1 << 20, 1 << 20)
    with closing(new_store(location)) as store:
        recording = Recording(store, RUN, limits, policy.ask, by_text=False, temperature=1.0)
        sessions = RecordedSessions(recording, SharedKey(KEY), idle_s=600)
        app = Starlette(routes=[Mount("/", create_app(sessions))], lifespan=sessions.under_way)
        with serving(app, host="127.0.0.1", port=0) as url:
            played = asyncio.run(play_all(url, policy, mine))
        tokens = [counts for session in played for counts in check_session(store, session)]
        assert sum(stored for stored, _ in tokens) <= 1.2 * sum(distinct for _, distinct in tokens)
        assert store.verify().corrupt == {} and store.verify().damage == []
    assert sql(location, "select (select count(*) from session_nodes) + (select count(*) from sessions)") == [(0,)]


def check_session(store: ReplayStore, session: PlayedSession) -> list[tuple[int, int]]:
    """Every reply is stored once as it was sampled; what was given is what is stored, and is trained.

    Tokens that are stored, and distinct ones: two that go on from a reply at once both hold what they have in common.
    """
    id = f"{RUN[:12]}:{session.name}"
    rows = list(store.read([id])) if session.given.keys() - session.asides else []
    for row in rows:
        sampled = {np.float32(said.log_probs).tobytes(): said for said in session.sampled}
        replies = {
            node.number: node.tokens.behavior_log_probs[-node.num_sampled :].tobytes()
            for node in row.nodes
            if node.num_sampled
        }
        assert sorted(replies.values()) == sorted(sampled), session.name
        # The small Mistral's template leaves out what is said before a call.
        assert session.policy.model.name == "mistral" or "template" not in {node.place.fork for node in row.nodes}
        trained = {node.number for node in row.nodes if node.is_trained}
        # An agent may say by itself, or have from another node, just what a reply says that nobody was given.
        gone_on = {node.place.parent for node in row.nodes if node.place.fork is None}
        assert trained - gone_on <= session.given.keys() - session.asides <= trained
        for number, said in session.given.items():
            assert plain(row.nodes[number].messages[-1]) == plain(said)
        for number, key in replies.items():
            asked = [plain(message) for message in conversation_of(row.nodes, number)[:-1]]
            assert asked == [plain(message) for message in session.policy.asked[key]]
        tree = tree_of(session.policy.model, nodes=row.nodes)
        by_node = {number: sampled[key] for number, key in replies.items()}
        return [check(RandomSession(session.policy.model, tree, by_node), most=1.5)]
    return []


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "seeds", [pytest.param(range(90), marks=pytest.mark.slow), pytest.param(range(90, 2000), marks=SOAK)], ids=str
)
def test_what_clients_get_over_http_is_stored_and_trained_exactly(location: Location, name: str, seeds: range) -> None:
    check_seeds(location, name, seeds)
