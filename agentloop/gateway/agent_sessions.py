"""Sessions of agents: each reply is sampled from the policy, kept with its tokens, and then given."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import count
from typing import Any, Literal

from agentloop.gateway.agent_request import AgentReply, AgentRequest, BadRequest, NoRoom
from agentloop.gateway.node_writer import NodeWriter
from agentloop.records import Completion, GenerationFailed
from context import Renderer, RenderError, ReplyParser, TrainingControl
from context.conversation_tree import ConversationTree, Prompt
from context.messages import canonical_json, content_hash
from context.templates.rendering.contents import contents
from context.tokens.session_nodes import Node, Status
from replay.errors import SessionForgotten
from replay.records import LARGEST_FLOAT32

Tools = Sequence[Mapping[str, Any]]
Ask = Callable[[AgentRequest, int, Prompt, int], Awaitable[Completion]]
"""Called with what the agent asks, a number that prompts have in common of which each goes on from the reply to the one
before, a prompt and the most new tokens; raises GenerationFailed. Awaited in the server's event loop."""
Finish = Literal["stop", "tool_calls", "length"]
_MOST_NODES = 2_000
"""Requests of one session: one that goes in circles must come to an end."""
_MOST_CHARACTERS = 64
"""Of a prompt, for each token there is room for: but for runs of white space, so many are far more than fit."""
_LONG = 1 << 14
"""Characters: to tokenize more takes so long that all who wait would notice."""
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


@dataclass(eq=False)
class _Asked:
    """A request, and the client that waits for its reply."""

    request: AgentRequest
    gone: asyncio.Future[Any]
    """Done once the client waits no more."""
    reply: asyncio.Future[AgentReply] = field(init=False)
    node: int | None = None
    """Whose reply is on its way."""


class AgentSession:
    """One episode of an agent."""

    def __init__(
        self,
        id: str,
        policy: Policy,
        ask: Ask,
        *,
        now: datetime,
        writer: NodeWriter | None = None,
        nodes: Sequence[Node] = (),
    ) -> None:
        """`now`: what templates take for today; `nodes`: what is stored already. `writer` stores each node before its
        reply is given; None: an agent that ends with this process has nobody who could ask for it again."""
        self.id, self._reply_ids = id, content_hash(id)[:12]
        self._policy = policy
        self._ask = ask
        self._writer = writer
        self.tree = ConversationTree(policy.renderer, policy.parser, now=now, control=policy.control, nodes=nodes)
        self.closed = False
        self.rewards: dict[str, float] = {}
        """What was posted, by agent; the whole episode's under the empty name."""
        self.ended = Future[None]()
        """Done once somebody has said that the episode is over, or with what nobody can go on after."""
        self.entropies: list[float] = []
        """Nats, one per sampled token whose entropy the engine said."""
        self.problem: str | None = None
        """Why the engine gave no reply, where it gave none."""
        self._asked: list[_Asked] = []
        """Requests that have no reply yet, or whose reply is on its way."""
        self._lines: dict[int, int] = {}
        """Numbers for the engine: a prompt has that of the reply it goes on from, by its node."""
        self._unstored: set[int] = set()
        self._quiet_since = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds for which nothing was asked, or is to be answered."""
        return 0.0 if any(not one.reply.done() for one in self._asked) else time.monotonic() - self._quiet_since

    async def reply(self, request: AgentRequest, gone: asyncio.Future[Any]) -> AgentReply:
        """The reply, stored. Raises BadRequest, RenderError, GenerationFailed.

        It is awaited to its end even if the client is `gone` meanwhile: that is done then. An equal request has the
        reply of one whose client is gone: the agent asks again. While a client waits for that, it is another sample.
        """
        self._asked = [one for one in self._asked if not (one.reply.done() and one.gone.done())]
        lost = (one for one in self._asked if one.gone.done() and _equal(one.request, request))
        asked = next(lost, None) or _Asked(request, gone)
        if asked not in self._asked:
            asked.reply = asyncio.ensure_future(self._reply(request, asked))
            asked.reply.add_done_callback(self._answered)
            self._asked.append(asked)
        asked.gone = gone
        return await asyncio.shield(asked.reply)

    def _answered(self, _: object) -> None:
        self._quiet_since = time.monotonic()

    async def _reply(self, request: AgentRequest, asked: _Asked) -> AgentReply:
        on_their_way = [one.node for one in self._asked if not one.gone.done()]

        def is_lost(node: Node) -> bool:
            is_its_own = node.agent == request.agent and not request.aside
            return node.number not in on_their_way and is_its_own and self._is_for(node, request)

        await self._tokenize(request)
        self._policy.parser(request.tools)  # what could not be shown or read is refused before it is sampled
        prompt = self.tree.prompt(request.messages, request.tools, agent=request.agent, is_lost=is_lost)
        if prompt.follows is not None:
            self._is_delivered(prompt.follows)  # who goes on from a reply has it, whatever became of the connection
        if prompt.repeats is not None:
            asked.node = prompt.repeats
            await self._store()
            return self._written(self.tree.nodes[prompt.repeats], cached=len(prompt.tokens))
        if len(self.tree.nodes) >= _MOST_NODES:
            raise BadRequest(400, f"An episode must have at most {_MOST_NODES} requests, got more.")
        room = self._policy.max_tokens - len(prompt.tokens)
        if room < 1:
            await self._store(self.tree.refuse(prompt, agent=request.agent))
            raise NoRoom(len(prompt.tokens), self._policy.max_tokens)
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
        asked.node = node.number
        await self._store(node)
        return self._written(node, cached=prompt.place.kept_tokens)

    async def _tokenize(self, request: AgentRequest) -> None:
        """In a thread, so that the renderer knows what is long when it is asked. Raises NoRoom for far too much."""
        texts = (content.text for message in request.messages for content in contents(message))
        characters, most = sum(map(len, texts)) + len(repr(request.tools)), self._policy.max_tokens
        if characters > most * _MOST_CHARACTERS:
            raise NoRoom(characters // _MOST_CHARACTERS, most)
        if characters > _LONG:
            with suppress(RenderError):  # raised again where it matters
                await asyncio.to_thread(self._policy.renderer.initial, request.messages, request.tools)

    async def _sampled(self, request: AgentRequest, prompt: Prompt, most: int) -> Completion:
        at = prompt.place.parent
        line = self._lines.pop(at, None) if at is not None and prompt.place.fork is None else None
        line = next(_LINES) if line is None else line
        try:
            completion = await self._ask(request, line, prompt, most)
        except GenerationFailed as failure:
            self.problem = str(failure)
            raise
        except BadRequest:  # an upstream's
            raise
        except Exception as error:  # no failure of this request: whoever plays the episode ends with it
            with suppress(InvalidStateError):
                self.ended.set_exception(error)
            raise
        if self.closed:
            raise BadRequest(403, "The episode must be one that is under way, got one that has ended meanwhile.")
        self._lines[len(self.tree.nodes)] = line
        self.entropies.extend(completion.entropies or ())
        return completion

    async def _store(self, *new: Node) -> None:
        """Returns once these nodes are stored, and those before that could not be."""
        if self._writer is None:
            return
        self._unstored |= {node.number for node in new}
        if waiting := sorted(self._unstored):
            try:
                await self._writer.store(self.id, [self.tree.nodes[number] for number in waiting])
            except SessionForgotten:
                self.closed = True
                raise forgotten() from None
        self._unstored.difference_update(waiting)

    def _is_for(self, node: Node, request: AgentRequest) -> bool:
        """Whether a reply is no longer than the request allows, and not shorter by another limit."""
        room = self._policy.max_tokens - (node.num_path_tokens - node.num_sampled)
        most = min(room, self._policy.max_reply_tokens, request.max_tokens or room)
        return node.num_sampled == most or (node.num_sampled < most and self.tree.ended(node.number))

    def _written(self, node: Node, *, cached: int) -> AgentReply:
        said, number = node.messages[-1], node.number
        calls = [replace(call, id=id) for call, id in zip(said.tool_calls, self.tree.call_ids(number), strict=True)]
        id = f"{self._reply_ids}{number:04d}"
        ended: Finish = "tool_calls" if calls else "stop"
        finish: Finish = ended if self.tree.ended(number) else "length"
        message = replace(said, tool_calls=tuple(calls))
        prompt_tokens = node.num_path_tokens - node.num_sampled
        return AgentReply(id, message, finish, prompt_tokens, node.num_sampled, int(time.time()), cached)

    def given(self, id: str) -> AgentReply | None:
        """See `Given`."""
        number = id.removeprefix(self._reply_ids)
        nodes = self.tree.nodes[int(number) :][:1] if number.isdecimal() else []
        replies = (self._written(node, cached=0) for node in nodes if node.num_sampled)
        return next((reply for reply in replies if reply.id == id), None)

    def delivered(self, reply: AgentReply) -> None:
        """All but the mark of the reply's end has been sent, and the agent is there: it asks nothing before this."""
        self._is_delivered(int(reply.id.removeprefix(self._reply_ids)))

    def _is_delivered(self, number: int) -> None:
        if self.tree.nodes[number].status != Status.UNDELIVERED:
            return
        self.tree.delivered(number)
        if self._writer is not None:
            self._writer.delivered(self.id, number)

    async def count_tokens(self, request: AgentRequest) -> int:
        """Tokens of the prompt. Raises BadRequest, RenderError."""
        await self._tokenize(request)
        return len(self.tree.prompt(request.messages, request.tools).ids)

    async def reward(self, rewards: Mapping[str, float], *, end: bool) -> None:
        """Rewards by agent, the whole episode's under the empty name; `end`: it is over. Raises BadRequest."""
        bad = next((agent for agent, reward in rewards.items() if not abs(reward) <= LARGEST_FLOAT32), None)
        if bad is not None:
            raise BadRequest(400, f"The reward must be a number that float32 can hold, got {rewards[bad]}.", "reward")
        self.rewards |= rewards
        if end:
            with suppress(InvalidStateError):  # said twice
                self.ended.set_result(None)


def forgotten() -> BadRequest:
    return BadRequest(403, "The session must be one that is stored, got one that was forgotten.")


def _equal(one: AgentRequest, other: AgentRequest) -> bool:
    """To the letter: 1 is not true."""
    if one.max_tokens != other.max_tokens:
        return False
    written = [(each.agent, each.aside, repr(each.messages), canonical_json(each.tools)) for each in (one, other)]
    return written[0] == written[1]
