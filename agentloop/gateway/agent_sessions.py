"""Sessions of agents: each reply is sampled from the policy, kept with its tokens, and then given."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from typing import Any, Literal

from agentloop.gateway.agent_request import AgentReply, AgentRequest, BadRequest, NoRoom
from agentloop.gateway.episode_keys import EpisodeKeys
from agentloop.gateway.node_writer import NodeWriter
from agentloop.records import Completion, GenerationFailed
from context import Renderer, ReplyParser, TrainingControl
from context.conversation_tree import ConversationTree, Prompt
from context.messages import canonical_json
from context.tokens.session_nodes import Node, Status

Tools = Sequence[Mapping[str, Any]]
Ask = Callable[[AgentRequest, int, Sequence[int], int], Awaitable[Completion]]
"""Called with what the agent asks, a number that prompts have in common of which each goes on from the reply to the one
before, a prompt and the most new tokens; raises GenerationFailed. Awaited in the server's event loop."""
Finish = Literal["stop", "tool_calls", "length"]
_MOST_NODES = 2_000
"""Requests of one session: one that goes in circles must come to an end."""
_LINES = count(1 << 32)
"""Apart from the numbers of episodes that are no agents'."""


@dataclass(frozen=True)
class Policy:
    """What sessions are rendered, read and limited by."""

    renderer: Renderer
    parser: Callable[[Tools], ReplyParser]
    control: TrainingControl
    max_tokens: int
    """Of prompt and reply."""
    max_reply_tokens: int


@dataclass(frozen=True)
class StoredNodes:
    """What is stored of a session, and who stores more of it."""

    writer: NodeWriter
    nodes: tuple[Node, ...] = ()


class AgentSessions:
    """The sessions that this process answers."""

    def __init__(self) -> None:
        self._keys = EpisodeKeys()
        self._open: dict[str, AgentSession] = {}

    def add(self, session: AgentSession) -> str:
        """Answer it from now on, who has the key that is returned."""
        self._open[session.id] = session
        return self._keys.key(session.id)

    def remove(self, session: AgentSession) -> None:
        """Answer it no more."""
        self._open.pop(session.id, None)
        session.closed = True

    async def authorize(self, episode: str, key: str) -> AgentSession:
        self._keys.check(episode, key)
        session = self._open.get(episode)
        if session is None:
            raise BadRequest(403, "The episode must be one that is under way, got one that has ended.")
        return session


class AgentSession:
    """One episode of an agent."""

    def __init__(self, id: str, policy: Policy, ask: Ask, *, now: datetime, stored: StoredNodes | None = None) -> None:
        """`now`: what templates take for today. `stored`: where each node is before its reply is given; None: an agent
        that ends with this process has nobody who could ask for it again."""
        self.id = id
        self._policy = policy
        self._ask = ask
        self._stored = stored
        nodes = () if stored is None else stored.nodes
        self.tree = ConversationTree(policy.renderer, policy.parser, now=now, control=policy.control, nodes=nodes)
        self.closed = False
        self.rewards: dict[str, float] = {}
        """What was posted, by agent; the whole episode's under the empty name."""
        self.ended = Future[None]()
        """Done once somebody has said that the episode is over."""
        self.entropies: list[float] = []
        """Nats, one per sampled token whose entropy the engine said."""
        self.problem: str | None = None
        """Why the engine gave no reply, where it gave none."""
        self._asked: list[tuple[AgentRequest, asyncio.Future[AgentReply]]] = []
        """What has no reply yet."""
        self._lines: dict[int, int] = {}
        """Numbers for the engine: a prompt has that of the reply it goes on from, by its node."""
        self._numbers: dict[str, int] = {}
        """Nodes by the ids of their replies."""
        self._unstored: dict[int, Node] = {}
        self._quiet_since = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds for which nothing was asked, or is to be answered."""
        return 0.0 if self._asked else time.monotonic() - self._quiet_since

    async def reply(self, request: AgentRequest) -> AgentReply:
        """Equal requests at the same time are one: an agent that asks again has given the first one up."""
        answer = next((answer for other, answer in self._asked if _equal(other, request)), None)
        if answer is None:
            answer = asyncio.ensure_future(self._reply(request))
            self._asked.append((request, answer))
            answer.add_done_callback(self._answered)
        return await asyncio.shield(answer)

    def _answered(self, done: asyncio.Future[AgentReply]) -> None:
        self._asked = [(request, answer) for request, answer in self._asked if answer is not done]
        self._quiet_since = time.monotonic()

    async def _reply(self, request: AgentRequest) -> AgentReply:
        prompt = self.tree.prompt(request.messages, request.tools)
        at = prompt.place.parent
        if at is not None and prompt.place.fork is None:
            self._is_delivered(at)  # who goes on from a reply has it, whatever became of the connection
        if prompt.repeats is not None:
            await self._store()
            return self._written(self.tree.nodes[prompt.repeats], cached=len(prompt.ids))
        room = self._policy.max_tokens - len(prompt.ids)
        if room < 1 or len(self.tree.nodes) >= _MOST_NODES:
            await self._store(self.tree.refuse(prompt, agent=request.agent))
            raise NoRoom(len(prompt.ids), self._policy.max_tokens)
        most = min(room, self._policy.max_reply_tokens, request.max_tokens or room)
        completion = await self._sampled(request, prompt, most)
        status = Status.ASIDE if request.aside else Status.UNDELIVERED
        node, _ = self.tree.add(
            prompt,
            completion.token_ids,
            completion.log_probs,
            policy_version=completion.policy_version,
            agent=request.agent,
            status=status,
        )
        await self._store(node)
        return self._written(node, cached=prompt.place.kept_tokens)

    async def _sampled(self, request: AgentRequest, prompt: Prompt, most: int) -> Completion:
        at = prompt.place.parent
        line = self._lines.pop(at, None) if at is not None and prompt.place.fork is None else None
        line = next(_LINES) if line is None else line
        try:
            completion = await self._ask(request, line, prompt.ids, most)
        except GenerationFailed as failure:
            self.problem = str(failure)
            raise
        if self.closed:
            raise BadRequest(403, "The episode must be one that is under way, got one that has ended meanwhile.")
        self._lines[len(self.tree.nodes)] = line
        self.entropies.extend(completion.entropies or ())
        return completion

    async def _store(self, *new: Node) -> None:
        """Returns once these nodes are stored, and those before that could not be."""
        if self._stored is not None:
            self._unstored |= {node.number: node for node in new}
            waiting = list(self._unstored.values())
            await asyncio.gather(*(self._stored.writer.store(self.id, node) for node in waiting))
            for node in waiting:
                self._unstored.pop(node.number, None)

    def _written(self, node: Node, *, cached: int) -> AgentReply:
        said, number = node.messages[-1], node.number
        calls = [replace(call, id=id) for call, id in zip(said.tool_calls, self.tree.call_ids(number), strict=True)]
        id = f"{self.id[:12]}{number:04d}"
        self._numbers[id] = number
        ended: Finish = "tool_calls" if calls else "stop"
        finish: Finish = ended if self.tree.ended(number) else "length"
        message = replace(said, tool_calls=tuple(calls))
        prompt_tokens = node.num_path_tokens - node.num_sampled
        return AgentReply(id, message, finish, prompt_tokens, node.num_sampled, int(time.time()), cached)

    def delivered(self, reply: AgentReply) -> None:
        self._is_delivered(self._numbers[reply.id])

    def _is_delivered(self, number: int) -> None:
        if self.tree.nodes[number].status != Status.UNDELIVERED:
            return
        self.tree.delivered(number)
        if self._stored is not None:
            self._stored.writer.delivered(self.id, number)

    async def count_tokens(self, request: AgentRequest) -> int:
        return len(self.tree.prompt(request.messages, request.tools).ids)

    async def reward(self, rewards: Mapping[str, float], *, end: bool) -> None:
        bad = next((agent for agent, reward in rewards.items() if not math.isfinite(reward)), None)
        if bad is not None:
            raise BadRequest(400, f"The reward must be finite, got {rewards[bad]}.", "reward")
        self.rewards |= rewards
        if end:
            with suppress(InvalidStateError):  # said twice
                self.ended.set_result(None)


def _equal(one: AgentRequest, other: AgentRequest) -> bool:
    """To the letter: 1 is not true."""
    return repr(one.messages) == repr(other.messages) and canonical_json(one.tools) == canonical_json(other.tools)
