"""Random agents ask over HTTP by official clients, whatever becomes of the gateway: what they know that they were given
is what is stored, and is what is trained."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from agentloop.gateway.agent_request import AgentRequest
from agentloop.gateway.agent_sessions import Ask, Policy
from agentloop.gateway.endpoints import create_app
from agentloop.gateway.recorded_sessions import RecordedSession, RecordedSessions, Recording
from agentloop.gateway.run_gateway import serving
from agentloop.records import Completion
from context import Message, choose_parser
from context.conversation_tree import Prompt
from context.tokens.session_nodes import conversation_of
from replay.storage.databases import Location
from replay.store import ReplayStore
from tests.context.test_conversation_tree import SOAK, check
from tests.fakes.families import Family, family
from tests.fakes.random_agents import PARSERS, TOOLS, RandomAgent, RandomSession, SampledReply, sampled_reply, tree_of
from tests.fakes.random_clients import RandomClients
from tests.fakes.records import RUN, new_store, sql

KEY = "the-agents-secret"
ROOM = 120
"""Tokens, beyond those of a first prompt."""
_REFUSED = (openai.BadRequestError, anthropic.BadRequestError)
_FAILED = (openai.InternalServerError, anthropic.InternalServerError)
_BROKEN = (openai.APIConnectionError, anthropic.APIConnectionError)
"""As the server closes a connection behind what fails, which may be asked again before that is noticed."""


def plain(message: Message) -> tuple[Any, ...]:
    """What a message says, by whatever ids, and without what an agent adds to calls that it was given."""
    calls = [
        (call.name, {name: value for name, value in call.arguments.items() if name != "by_default"})
        for call in message.tool_calls
    ]
    return message.role, message.content, message.reasoning or None, calls


class Gateways:
    """A recording whose gateway is replaced now and then by one that has what is stored, and nothing else. What the one
    before has not stored by then it never stores, as after a kill; who waits for that is given an error."""

    def __init__(self, location: Location, limits: Policy, ask: Ask, rng: random.Random) -> None:
        self._location, self._limits, self._ask, self._rng = location, limits, ask, rng
        self.number = 0
        """How many there were before."""
        self._sessions: RecordedSessions
        self._until_end = AsyncExitStack()

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with self._until_end:
            await self._begin()
            yield

    async def check(self, episode: str, key: str) -> None:
        await self._sessions.check(episode, key)

    async def authorize(self, episode: str, key: str) -> RecordedSession:
        await self.end_now_and_then()
        return await self._sessions.authorize(episode, key)

    async def end_now_and_then(self) -> None:
        if self._rng.random() < 0.02:
            self.number += 1
            await self._begin()

    async def _begin(self) -> None:
        store = ReplayStore.open(self._location)
        self._until_end.callback(store.close)
        store.resume(RUN, 0)
        recording = Recording(store, RUN, self._limits, self._ask, by_text=False, temperature=1.0)
        self._sessions = RecordedSessions(recording, KEY, idle_s=600)
        await self._until_end.enter_async_context(self._sessions.lifespan(Starlette()))


@dataclass
class RandomPolicy:
    """Says whatever a policy may say, each request by its number; some of them only once they are let go."""

    model: Family
    rng: random.Random
    gateways: Gateways = field(init=False)
    sampled: dict[str, SampledReply] = field(default_factory=dict)
    asked: dict[bytes, Sequence[Message]] = field(default_factory=dict)
    """Conversations by the log-probs of their replies."""
    held: dict[str, tuple[threading.Event, threading.Event]] = field(default_factory=dict)
    """Of requests by number: set once it is asked, and once it may be answered."""

    async def ask(self, request: AgentRequest, line: int, prompt: Prompt, most: int) -> Completion:
        number = str(next(iter(request.body["metadata"].values())))
        if number in self.held:
            asked, free = self.held[number]
            asked.set()
            await asyncio.to_thread(free.wait)
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        await self.gateways.end_now_and_then()
        assert number not in self.sampled
        whole = sampled_reply(self.rng, self.model, prompt.ids, len(self.sampled), mark=f" {number}")
        said = replace(whole, token_ids=whole.token_ids[:most], log_probs=whole.log_probs[:most])
        self.sampled[number] = said
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
    kept: list[tuple[int, list[Message]]] = field(default_factory=list)
    """Conversations that end with a given reply of a node, as the agent keeps it."""
    heard: dict[int, list[Any]] = field(default_factory=dict)
    """Conversations that end with a given reply, by nodes: two samples of one prompt may be equal."""
    followed: list[set[int]] = field(default_factory=list)
    """Each time that the agent went on from a reply and was answered: the nodes of the replies that it may mean."""
    unsure: dict[int, int] = field(default_factory=dict)
    """Given replies that may not be known to be, by nodes: the gateway that gave each has answered nothing since."""
    is_row: bool = False
    counts: Counter[str] = field(default_factory=Counter)
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
                if agent.conversations[number] == messages and is_refused:
                    agent.refused(number)
                elif agent.conversations[number] == messages and reply is not None:
                    agent.hear(number, reply[1])
                    self.kept.append((reply[0], [*agent.conversations[number]]))
        while self.policy.held.keys() - self.policy.sampled.keys():
            await asyncio.sleep(0.002)  # until nobody's reply is there, too
        await self.clients.settled()

    async def _answer(self, messages: list[Message], tools: Any) -> tuple[tuple[int, Message] | None, bool]:
        """The node and reply that the agent is given, if it waits for it; and whether it is refused."""
        ask, stream = self.rng.choice(self.clients.asks), self.rng.random() < 0.5
        model = self.rng.choice([*["policy/digger"] * 9, "aside"])
        gives_up, comes_back = self.rng.random() < 0.12, self.rng.random() < 0.5
        self.asked += 1
        number, gateway = f"{self.name}-{self.asked}", self.policy.gateways.number
        before = [node for node, gave in self.unsure.items() if gave == gateway]
        try:
            given: Any = {"model": model, "stream": stream, "metadata": {"number": number}}
            waiting = asyncio.ensure_future(ask(messages, tools, **given))
            if gives_up and model != "aside" and await self._given_up(number, waiting):
                if not comes_back:
                    return None, False
                given["metadata"] = {"number": f"{number}-again"}
                waiting = asyncio.ensure_future(ask(messages, tools, **given))
            id, said = await waiting
        except _REFUSED:
            self.counts["refused"] += 1
            return None, True
        except (*_FAILED, *_BROKEN) as error:
            assert gateway < self.policy.gateways.number or isinstance(error, _BROKEN)
            self.counts["failed"] += 1
            return None, False
        self.given[node := int(id[-4:])] = said
        if gateway == self.policy.gateways.number:
            self.unsure = {node: gave for node, gave in self.unsure.items() if node not in before}
        self.unsure[node] = gateway
        self.heard[node] = [plain(message) for message in (*messages, said)]
        kept = [self.heard[number] for number, kept in self.kept if messages[: len(kept)] == kept]
        self.followed += [{other for other, heard in self.heard.items() if heard == one} for one in kept]
        if model == "aside":
            self.asides.add(node)
        return (node, said), False

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
        played.is_row = await clients.end()
        return played

    fours = [seeds[first : first + 4] for first in range(0, len(seeds), 4)]
    return [played for four in fours for played in await asyncio.gather(*map(play, four))]


def check_seeds(location: Location, name: str, seeds: range) -> Counter[str]:
    """Counts of what happened."""
    model, mine = family(name), [seed for seed in seeds if seed % len(PARSERS) == list(PARSERS).index(name)]
    parser, policy = choose_parser(PARSERS[name], model.template), RandomPolicy(model, random.Random(seeds[0]))
    most = len(model.renderer().initial([Message("user", "Find pearl.")], TOOLS)) + ROOM
    limits = Policy(model.renderer(), lambda tools: parser, most, most)
    with closing(new_store(location)) as store:
        policy.gateways = Gateways(location, limits, policy.ask, policy.rng)
        app = Starlette(routes=[Mount("/", create_app(policy.gateways))], lifespan=policy.gateways.lifespan)
        with serving(app, host="127.0.0.1", port=0) as url:
            played = asyncio.run(play_all(url, policy, mine))
        for session in played:
            check_session(store, session)
        counts = sum((session.counts for session in played), Counter(sessions=len(played)))
        assert counts["stored"] <= 1.3 * counts["distinct"]
        assert store.verify().corrupt == {} and store.verify().damage == []
    assert sql(location, "select (select count(*) from session_nodes) + (select count(*) from sessions)") == [(0,)]
    return counts + Counter(restarts=policy.gateways.number)


def check_session(store: ReplayStore, session: PlayedSession) -> None:
    """Every reply is stored as it was sampled; what was given is what is stored, and is trained, and nothing else is.

    A reply may be given, but not known to be, where another gateway took the place of the one that gave it: it is
    trained if the agent went on from it. One of two equal replies is, for nobody can say which the agent meant.
    """
    nodes = next(iter(store.read([f"{RUN[:12]}:{session.name}"]))).nodes if session.is_row else ()
    given, trained = session.given.keys() - session.asides, {node.number for node in nodes if node.is_trained}
    doubtful = given - trained
    assert trained <= given and bool(trained) == session.is_row, session.name
    assert all(numbers & (trained | session.asides) for numbers in session.followed), session.name
    last = session.policy.gateways.number
    assert all(session.unsure.get(number, last) < last for number in doubtful), session.name
    session.counts.update(requests=session.asked, given=len(given), trained=len(trained), doubtful=len(doubtful))
    sampled = {np.float32(said.log_probs).tobytes(): said for said in session.sampled}
    replies = {
        node.number: node.tokens.behavior_log_probs[-node.num_sampled :].tobytes() for node in nodes if node.num_sampled
    }
    assert Counter(replies.values()) <= Counter(sampled.keys())
    # The small Mistral's template leaves out what is said before a call.
    assert session.policy.model.name == "mistral" or "template" not in {node.place.fork for node in nodes}
    for number in given if nodes else ():
        assert plain(nodes[number].messages[-1]) == plain(session.given[number])
    for number, key in replies.items():
        asked = [plain(message) for message in conversation_of(nodes, number)[:-1]]
        assert asked == [plain(message) for message in session.policy.asked[key]]
    by_node = {number: sampled[key] for number, key in replies.items()}
    stored, distinct = check(
        RandomSession(session.policy.model, tree_of(session.policy.model, nodes=nodes), by_node), most=1.5
    )
    session.counts.update(stored=stored, distinct=distinct)


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "seeds", [pytest.param(range(90), marks=pytest.mark.slow), pytest.param(range(90, 2000), marks=SOAK)], ids=str
)
def test_replies_over_http_are_stored_and_trained_exactly(location: Location, name: str, seeds: range) -> None:
    chunks = [range(seeds[at], min(seeds[at] + 90, seeds.stop)) for at in range(0, len(seeds), 90)]
    print(name, dict(sum((check_seeds(location, name, chunk) for chunk in chunks), Counter[str]())))
