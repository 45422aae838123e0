"""Nothing is given to an agent that is not stored, and what it goes on from was given."""

import asyncio
import math
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from agentloop.config import RunConfig
from agentloop.gateway.agent_request import AgentRequest, BadRequest
from agentloop.gateway.agent_sessions import AgentSession, Policy
from agentloop.gateway.endpoints import create_app
from agentloop.gateway.node_writer import NodeWriter
from agentloop.gateway.recorded_sessions import RecordedSessions, Recording
from agentloop.gateway.run_gateway import RunGateway, serving
from agentloop.records import Completion
from agentloop.rollouts.actors import agents_policy
from context import Message, RenderError, choose_parser
from context.conversation_tree import Prompt
from replay.errors import DatabaseFailed, SessionForgotten
from replay.storage.sessions import OpenSession
from replay.store import ReplayStore
from tests.fakes.families import family
from tests.fakes.random_agents import PARSERS, TODAY, TOOLS, random_session
from tests.fakes.records import RUN, new_store, sql


def request(*messages: Message) -> AgentRequest:
    return AgentRequest("policy", "", False, messages, [], None, False, (), {})


MODEL = family("chatml")
POLICY = Policy(MODEL.renderer(), lambda tools: choose_parser(PARSERS["chatml"], MODEL.template), 4096, 256)


class Sampler:
    """Says another number each time, while it may."""

    def __init__(self) -> None:
        self.count, self.free = 0, asyncio.Event()
        self.free.set()

    async def ask(self, _: AgentRequest, line: int, prompt: Prompt, most: int) -> Completion:
        self.count += 1
        ids = (*MODEL.codec.encode(f"It is {self.count}."), MODEL.end_id)
        await self.free.wait()
        return Completion(ids[:most], (-0.5,) * len(ids[:most]), 0)


@contextmanager
def written(path: Path, *sessions: str) -> Iterator[tuple[ReplayStore, NodeWriter]]:
    """A new store with these open sessions, and their writer, which has stored all at the end of the block."""
    with closing(new_store(path)) as store:
        for id in sessions or ("s",):
            store.sessions.open(OpenSession(id, RUN, TODAY.isoformat()))
        with closing(NodeWriter(store.sessions)) as writer:
            yield store, writer


def test_equal_requests_are_samples_of_their_own_unless_nobody_waits_for_the_one_before(tmp_path: Path) -> None:
    async def play(writer: NodeWriter) -> None:
        sampler, asked = Sampler(), request(Message("user", "Where?"))
        sampler.free.clear()
        session = AgentSession("s", POLICY, sampler.ask, now=TODAY, writer=writer)
        clients = [asyncio.Future[None]() for _ in range(7)]
        named = [*[asked] * 5, replace(asked, agent="cook"), replace(asked, aside=True)]
        waiting = []
        for client, one in zip(clients, named, strict=True):
            waiting.append(asyncio.ensure_future(session.reply(one, client)))
            for _ in range(3):  # until the policy is asked
                await asyncio.sleep(0)
            if len(waiting) == 3:
                client.set_result(None)  # it has given up: the next one has its reply
        sampler.free.set()
        replies = await asyncio.gather(*waiting)
        assert [int(reply.id[-4:]) for reply in replies] == [0, 1, 2, 2, 3, 4, 5]
        session.mark_delivered(replies[0])
        again = await session.reply(asked, asyncio.Future())  # of the others, each is on its way
        assert (sampler.count, again.id[-4:]) == (7, "0006")
        clients[4].set_result(None)
        for other in (replace(asked, agent="cook"), replace(asked, aside=True)):
            assert (await session.reply(other, asyncio.Future())).id != replies[4].id
        assert (await session.reply(asked, asyncio.Future())).id == replies[4].id
        tree = session.tree.nodes
        assert [node.place.fork for node in tree] == ["new"] + ["retry"] * 8
        assert sum(len(node.tokens) - node.num_sampled for node in tree) == len(tree[0].tokens) - tree[0].num_sampled

    with written(tmp_path / "replay.sqlite") as (store, writer):
        asyncio.run(play(writer))
        writer.close()
        found = store.sessions.nodes("s")
    assert [node.status for node in found] == ["trained", *["undelivered"] * 4, "aside", *["undelivered"] * 2, "aside"]


@pytest.mark.parametrize("is_new", [False, True], ids=["asked again", "asked for more"])
def test_a_reply_that_could_not_be_stored_is_stored_before_anything_is_given(tmp_path: Path, is_new: bool) -> None:
    async def play() -> None:
        session = AgentSession("s", POLICY, Sampler().ask, now=TODAY, writer=writer)
        gone = asyncio.Future[None]()
        gone.cancel()
        first, more = Message("user", "Where?"), (Message("assistant", "It is 1."), Message("user", "Sure?"))
        sql(path, "alter table session_nodes rename to elsewhere")
        with pytest.raises(DatabaseFailed, match="no such table"):
            await session.reply(request(first), gone)
        sql(path, "alter table elsewhere rename to session_nodes")
        reply = await session.reply(request(first, *more) if is_new else request(first), gone)
        assert reply.message.content == ("It is 2." if is_new else "It is 1.")

    with written(path := tmp_path / "replay.sqlite") as (store, writer):
        asyncio.run(play())
        writer.close()
        found = [(node.messages[-1].content, node.status) for node in store.sessions.nodes("s")]
    assert found == (
        [("It is 1.", "trained"), ("It is 2.", "undelivered")] if is_new else [("It is 1.", "undelivered")]
    )


def test_who_waits_no_more_for_a_commit_keeps_no_other_from_one(tmp_path: Path) -> None:
    nodes = random_session(1).tree.nodes[:2]

    async def play() -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("begin immediate")
            leaving = asyncio.ensure_future(writer.store("s", nodes[:1]))
            await asyncio.sleep(0)
            leaving.cancel()
        async with asyncio.timeout(20):
            await writer.store("s", nodes[1:])

    with written(path := tmp_path / "replay.sqlite") as (store, writer):
        asyncio.run(play())
        assert len(store.sessions.nodes("s")) == 2


def test_a_session_that_was_forgotten_is_closed_and_keeps_no_other_from_being_stored(tmp_path: Path) -> None:
    async def play() -> None:
        sampler = Sampler()
        sessions = [AgentSession(id, POLICY, sampler.ask, now=TODAY, writer=writer) for id in ("a", "forgotten", "b")]
        asked = request(Message("user", "Where?"))
        before = await asyncio.gather(*(session.reply(asked, asyncio.Future()) for session in sessions))
        store.sessions.end(["forgotten"])
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("begin immediate")  # what is asked meanwhile is stored together
            for session, reply in zip(sessions, before, strict=True):
                session.mark_delivered(reply)
            storing = [asyncio.ensure_future(writer.store(each.id, each.tree.nodes)) for each in sessions[1:]]
            await asyncio.sleep(0)
        stored = await asyncio.gather(*storing, return_exceptions=True)
        assert [type(error) for error in stored] == [SessionForgotten, type(None)]
        for _ in range(2):
            with pytest.raises(BadRequest, match="got one that"):
                await sessions[1].reply(asked, asyncio.Future())
        assert [session.closed for session in sessions] == [False, True, False]

    with written(path := tmp_path / "replay.sqlite", "a", "forgotten", "b") as (store, writer):
        asyncio.run(play())
        writer.close()
        assert [[node.status for node in store.sessions.nodes(id)] for id in "ab"] == [["trained"], ["trained"]]


def test_an_agent_that_goes_on_says_nothing_of_what_others_were_given() -> None:
    async def play() -> None:
        session, waits = AgentSession("s", POLICY, Sampler().ask, now=TODAY), asyncio.Future[None]()
        asked = [Message("user", "Where?"), Message("assistant", "It is 1."), Message("user", "Sure?")]
        for agent in ("scout", "cook"):
            await session.reply(replace(request(asked[0]), agent=agent), waits)
        await session.reply(replace(request(*asked), agent="scout"), waits)
        assert [node.status for node in session.tree.nodes] == ["trained", "undelivered", "undelivered"]

    asyncio.run(play())


def recorded(path: Path, play: Callable[[RecordedSessions, Sampler], Awaitable[None]]) -> None:
    """The sessions of a recording, played."""

    async def played() -> None:
        sampler = Sampler()
        recording = Recording(store, RUN, POLICY, sampler.ask, by_text=False, temperature=1.0)
        sessions = RecordedSessions(recording, None, idle_s=600)
        async with sessions.lifespan(Starlette()):
            await play(sessions, sampler)

    with closing(new_store(path)) as store:
        asyncio.run(played())


async def given(session: AgentSession, text: str = "Where?") -> None:
    session.mark_delivered(await session.reply(request(Message("user", text)), asyncio.Future()))


def test_end_of_a_session_is_said_once_and_waits_for_nobody(tmp_path: Path) -> None:
    async def play(sessions: RecordedSessions, sampler: Sampler) -> None:
        session = await sessions.authorize("a", "")
        await given(session)
        sampler.free.clear()
        late = asyncio.ensure_future(session.reply(request(Message("user", "Why?")), asyncio.Future()))
        while sampler.count < 2:
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            ends = (session.reward({"": reward}, end=True) for reward in (0.75, 0.0))
            ended = await asyncio.gather(*ends, return_exceptions=True)
        sampler.free.set()
        refused = [ended[1], *await asyncio.gather(late, return_exceptions=True)]
        assert ended[0] is None and [getattr(each, "status", each) for each in refused] == [403, 403]

    recorded(tmp_path / "replay.sqlite", play)
    assert sql(tmp_path / "replay.sqlite", "select reward, num_turns from trajectories") == [(0.75, 1)]
    assert sql(tmp_path / "replay.sqlite", "select * from sessions") == []


def test_forgotten_session_does_not_return_when_it_ends(tmp_path: Path) -> None:
    async def play(sessions: RecordedSessions, _: Sampler) -> None:
        session = await sessions.authorize("a", "")
        await given(session)
        sessions.recording.store.sessions.end([session.id])  # as forgetting does
        with pytest.raises(BadRequest, match="got one that was forgotten"):
            await session.reward({"": 1.0}, end=True)
        assert await sessions.authorize("a", "") is not session

    recorded(tmp_path / "replay.sqlite", play)
    assert sql(tmp_path / "replay.sqlite", "select count(*) from trajectories") == [(0,)]


def test_a_lost_reply_is_for_requests_that_allow_as_much() -> None:
    async def play() -> None:
        sampler, asked, gone = Sampler(), request(Message("user", "Where?")), asyncio.Future[None]()
        gone.set_result(None)
        session = AgentSession("s", POLICY, sampler.ask, now=TODAY)
        replies = [await session.reply(replace(asked, max_tokens=most), gone) for most in (3, None, 3, 200, 2)]
        assert [reply.finish for reply in replies] == ["length", "stop", "length", "stop", "length"]
        replies += await asyncio.gather(*(session.reply(replace(asked, max_tokens=most), gone) for most in (4, 5, 4)))
        assert [int(reply.id[-4:]) for reply in replies] == [0, 1, 0, 1, 2, 3, 4, 3]

    asyncio.run(play())


def test_others_are_answered_while_a_long_prompt_is_tokenized_and_far_too_long_ones_are_not() -> None:
    async def play() -> None:
        sampler, line, numbers = Sampler(), "Line of a log, 42 things.\n", iter(range(3))
        sessions = [AgentSession(f"s{number}", POLICY, sampler.ask, now=TODAY) for number in numbers]
        texts = (line * 8000, "Where?", line * 12000)  # 208,000 and 312,000 characters; 64 x 4,096 are 262,144
        long, short, longest = (
            asyncio.ensure_future(session.reply(request(Message("user", text)), asyncio.Future()))
            for session, text in zip(sessions, texts, strict=True)
        )
        done, _ = await asyncio.wait({long, short}, return_when=asyncio.FIRST_COMPLETED)
        assert done == {short}
        for waiting, tokens in ((long, "[0-9]{6}"), (longest, "4875")):  # 312,002 // 64
            with pytest.raises(BadRequest, match=f"resulted in {tokens} tokens"):
                await waiting
        assert [[node.status for node in session.tree.nodes] for session in sessions[::2]] == [["refused"], []]

    asyncio.run(play())


def test_tools_whose_calls_no_parser_reads_are_what_the_agent_can_not_offer() -> None:
    source = "{{ tools|tojson }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    policy = agents_policy(RunConfig(), MODEL.renderer(source))
    with pytest.raises(RenderError, match=r"^context\.parser must be "):
        policy.parser(TOOLS)


def test_reward_of_a_session_without_a_reply_to_learn_is_refused(tmp_path: Path) -> None:
    async def play(sessions: RecordedSessions, _: Sampler) -> None:
        mistyped, lost = [await sessions.authorize(name, "") for name in ("mistyped", "lost")]
        await lost.reply(request(Message("user", "Where?")), asyncio.Future())
        for session in (mistyped, lost):
            with pytest.raises(BadRequest, match="must be one whose agent was given a reply") as refusal:
                await session.reward({"": 1.0}, end=True)
            assert refusal.value.status == 400
        assert sql(tmp_path / "replay.sqlite", "select * from sessions") == []
        session = await sessions.authorize("mistyped", "")
        await given(session)
        for reward in (math.inf, 1e300):
            with pytest.raises(BadRequest, match="must be a number that float32 can hold"):
                await session.reward({"": reward}, end=True)
        await session.reward({"": 0.5}, end=True)

    recorded(tmp_path / "replay.sqlite", play)
    assert sql(tmp_path / "replay.sqlite", "select reward from trajectories") == [(0.5,)]


def test_only_what_asks_for_a_reply_opens_a_session(tmp_path: Path) -> None:
    path, body = tmp_path / "replay.sqlite", {"model": "policy", "messages": [{"role": "user", "content": "Where?"}]}
    with closing(new_store(path)) as store:
        recording = Recording(store, RUN, POLICY, Sampler().ask, by_text=False, temperature=1.0)
        sessions = RecordedSessions(recording, None, idle_s=600)
        app = Starlette(routes=[Mount("/", create_app(sessions))], lifespan=sessions.lifespan)
        with serving(app, host="127.0.0.1", port=0) as url, httpx2.Client(headers={"x-api-key": "any"}) as client:

            def status(name: str) -> int:
                return client.post(f"{url}/e/{name}/v1/chat/completions", json=body).status_code

            assert client.get(f"{url}/e/a/v1/models").status_code == 200
            assert client.post(f"{url}/e/b/v1/chat/completions", content=b"{").status_code == 400
            assert sql(path, "select * from sessions") == []
            assert [status(name) for name in "abab"] == [200] * 4
            assert sql(path, "select count(*) from sessions") == [(2,)]


def test_key_of_a_run_opens_its_own_episode_until_the_episode_ends() -> None:
    async def check() -> None:
        gateway = RunGateway(POLICY)
        one, other = (gateway.open(lambda *_: asyncio.sleep(0, Completion((), (), 0))) for _ in range(2))
        assert await gateway.authorize(one.id, one.key) is one
        for key in ("", "é", "\udcff", other.key, one.key.upper(), one.key[:-1]):
            with pytest.raises(BadRequest, match="The key must be this episode's, got another."):
                await gateway.authorize(one.id, key)
        one.close()
        with pytest.raises(BadRequest, match="got one that has ended"):
            await gateway.authorize(one.id, one.key)

    asyncio.run(check())


def test_sessions_that_end_at_once_are_compared_with_those_before_them(tmp_path: Path) -> None:
    async def play(sessions: RecordedSessions, _: Sampler) -> None:
        opened = [await sessions.authorize(str(number), "") for number in range(24)]
        await asyncio.gather(*map(given, opened))
        await asyncio.gather(*(one.reward({"": float(i % 2)}, end=True) for i, one in enumerate(opened)))

    recorded(tmp_path / "replay.sqlite", play)
    rows = sql(tmp_path / "replay.sqlite", "select slot, reward, advantage from trajectories order by slot")
    rewards = [reward for _, reward, _ in rows]
    assert [slot for slot, *_ in rows] == list(range(24))
    found = [advantage for *_, advantage in rows]
    assert found == pytest.approx([0.0, *(rewards[i] - sum(rewards[:i]) / i for i in range(1, 24))])
