"""One session per episode of an agent: it samples each reply, stores it with its tokens, and then delivers it.

An agent sends its whole conversation with each request. The session finds the earlier reply that the request continues
from, and builds the prompt on the tokens of that reply. Example: the policy replied "A" to "hi". The request "hi", "A",
"go on" continues from that reply: its prompt is the exact tokens sampled for "A", and then "go on".
"""

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
from context import Renderer, RenderError, ReplyParser
from context.conversation_tree import ConversationTree, Prompt
from context.messages import canonical_json, content_hash
from context.parse.reply import before_stop
from context.templates.rendering.contents import contents
from context.tokens.session_nodes import Node, Status
from replay.errors import SessionForgotten
from replay.records import LARGEST_FLOAT32

Tools = Sequence[Mapping[str, Any]]
Ask = Callable[[AgentRequest, int, Prompt, int], Awaitable[Completion]]
"""Samples a reply in the server's event loop. Takes request, conversation's number, prompt, and the most new tokens.
Prompts that each continue from the reply to the one before share a conversation's number. Raises GenerationFailed."""
Finish = Literal["stop", "tool_calls", "length"]
_MOST_NODES = 2_000
"""The most requests of one session: an agent that goes in circles must come to an end."""
_MOST_CHARACTERS = 64
"""Characters per token above which a prompt is far too long, unless it is mostly white space."""
_LONG = 1 << 14
"""Characters above which a prompt is tokenized in a thread: other requests would notice the time that it takes."""
_CONVERSATION_NUMBERS = count(1 << 32)
"""Numbers for the engine, far from those of episodes without an agent."""


@dataclass(frozen=True)
class Policy:
    """The renderer, the parser and the limits that all sessions use."""

    renderer: Renderer
    parser: Callable[[Tools], ReplyParser]
    max_tokens: int
    """The most tokens of a prompt and its reply together."""
    max_reply_tokens: int
    unsupported: Literal["refuse", "instruct"] = "instruct"
    """What becomes of a request's fields that no engine obeys: see `gateway.unsupported`."""


@dataclass(eq=False)
class _Pending:
    """A request whose reply is not yet sampled or sent, and the client that waits for it."""

    request: AgentRequest
    gone: asyncio.Future[Any]
    """Done once the client has disconnected."""
    reply: asyncio.Future[AgentReply] = field(init=False)
    node: int | None = None
    """The number of the node whose reply is being sent."""


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
        """`now` is the date that templates show; `nodes` are stored already. `writer` stores each node before its reply
        is delivered; None where the agent ends with this process, and so could ask for no stored reply."""
        self.id, self._reply_ids = id, content_hash(id)[:12]
        self._policy = policy
        self._ask = ask
        self._writer = writer
        self.tree = ConversationTree(policy.renderer, policy.parser, now=now, nodes=nodes)
        self.closed = False
        self.rewards: dict[str, float] = {}
        """The posted rewards by agent; the whole episode's reward has the empty name."""
        self.ended = Future[None]()
        """Done once somebody has ended the episode. It holds an exception where an error must end the worker or run."""
        self.entropies: list[float] = []
        """The entropy of each sampled token for which the engine gave one, in nats."""
        self.problem: str | None = None
        """Why the engine gave no reply; None where it always gave one."""
        self._pending: list[_Pending] = []
        """Requests without a reply yet, and requests whose reply is being sent."""
        self._conversations: dict[int, int] = {}
        """The conversation's number by the node of its last reply: the next prompt that continues from it takes it."""
        self._unstored: set[int] = set()
        self._quiet_since = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last request was answered; 0 while one waits for its reply."""
        return 0.0 if any(not one.reply.done() for one in self._pending) else time.monotonic() - self._quiet_since

    async def reply(self, request: AgentRequest, gone: asyncio.Future[Any]) -> AgentReply:
        """Sample a reply and store it. Raises BadRequest, RenderError, GenerationFailed.

        The future `gone` is done once the client has disconnected; the reply is then still sampled to its end. An equal
        request receives the reply that such a client missed: it is the agent's second try. If the first client still
        waits, the equal request asks for another sample.
        """
        self._pending = [one for one in self._pending if not (one.reply.done() and one.gone.done())]
        missed = (one for one in self._pending if one.gone.done() and _are_equal(one.request, request))
        pending = next(missed, None) or _Pending(request, gone)
        if pending not in self._pending:
            pending.reply = asyncio.ensure_future(self._reply(request, pending))
            pending.reply.add_done_callback(self._note_answer)
            self._pending.append(pending)
        pending.gone = gone
        return await asyncio.shield(pending.reply)

    def _note_answer(self, _: object) -> None:
        self._quiet_since = time.monotonic()

    async def _reply(self, request: AgentRequest, pending: _Pending) -> AgentReply:
        being_sent = [one.node for one in self._pending if not one.gone.done()]

        def is_lost(node: Node) -> bool:
            is_its_own = node.agent == request.agent and not request.aside
            return node.number not in being_sent and is_its_own and self._fits_limits(node, request)

        if request.instructed and self._policy.unsupported == "refuse":
            field = request.instructed[0]
            raise BadRequest(400, f"{field} must be left out where gateway.unsupported is refuse, got it.", field)
        await self._tokenize(request)
        self._policy.parser(request.tools)  # refuses tools that it can't show or read before anything is sampled
        prompt = self.tree.prompt(
            request.messages, request.tools, agent=request.agent, stop=request.stop, is_lost=is_lost
        )
        if prompt.follows is not None:
            self._mark_delivered(prompt.follows)  # the agent continues from the reply, so it has received it
        if prompt.repeats is not None:
            pending.node = prompt.repeats
            await self._store()
            return self._make_reply(self.tree.nodes[prompt.repeats], request, cached=len(prompt.tokens))
        if len(self.tree.nodes) >= _MOST_NODES:
            raise BadRequest(400, f"An episode must have at most {_MOST_NODES} requests, got more.")
        room = self._policy.max_tokens - len(prompt.tokens)
        if room < 1:
            await self._store(self.tree.refuse(prompt, agent=request.agent))
            raise NoRoom(len(prompt.tokens), self._policy.max_tokens)
        most = min(room, self._policy.max_reply_tokens, request.max_tokens or room)
        completion = await self._sample(request, prompt, most)
        status = Status.ASIDE if request.aside else Status.UNDELIVERED
        node, _ = self.tree.add(
            prompt,
            completion.token_ids,
            completion.log_probs,
            policy_version=completion.policy_version,
            agent=request.agent,
            status=status,
        )
        pending.node = node.number
        await self._store(node)
        return self._make_reply(node, request, cached=prompt.place.kept_tokens)

    async def _tokenize(self, request: AgentRequest) -> None:
        """Tokenize a long prompt in a thread, into the renderer's cache. Raises NoRoom if it is far too long."""
        texts = (content.text for message in request.messages for content in contents(message))
        characters, most = sum(map(len, texts)) + len(repr(request.tools)), self._policy.max_tokens
        if characters > most * _MOST_CHARACTERS:
            raise NoRoom(characters // _MOST_CHARACTERS, most)
        if characters > _LONG:
            with suppress(RenderError):  # the prompt's rendering raises it again
                await asyncio.to_thread(self._policy.renderer.initial, request.messages, request.tools)

    async def _sample(self, request: AgentRequest, prompt: Prompt, most: int) -> Completion:
        at = prompt.place.parent
        number = self._conversations.pop(at, None) if at is not None and prompt.place.fork is None else None
        number = next(_CONVERSATION_NUMBERS) if number is None else number
        try:
            completion = await self._ask(request, number, prompt, most)
            text = self._policy.renderer.codec.decode(completion.token_ids[:-1]) if request.stop else ""
            if before_stop(text, request.stop) is not None:
                raise GenerationFailed(
                    f"the engine must end a reply at its stop, got more tokens behind one of {text!r}"
                )
        except GenerationFailed as failure:
            self.problem = str(failure)
            raise
        except BadRequest:  # another model that answers has refused the request
            raise
        except Exception as error:  # not a failure of this request alone: it ends whatever plays the episode
            with suppress(InvalidStateError):
                self.ended.set_exception(error)
            raise
        if self.closed:
            raise BadRequest(403, "The episode must be one that is under way, got one that has ended meanwhile.")
        self._conversations[len(self.tree.nodes)] = number
        self.entropies.extend(completion.entropies or ())
        return completion

    async def _store(self, *new: Node) -> None:
        """Store these nodes, and earlier ones that could not be stored; return once they are on disk."""
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

    def _fits_limits(self, node: Node, request: AgentRequest) -> bool:
        """Whether a reply obeys the request's limit on tokens, and no other limit has cut it shorter."""
        room = self._policy.max_tokens - (node.num_path_tokens - node.num_sampled)
        most = min(room, self._policy.max_reply_tokens, request.max_tokens or room)
        return node.num_sampled == most or (node.num_sampled < most and self.tree.ended(node.number, request.stop))

    def _make_reply(self, node: Node, request: AgentRequest | None, *, cached: int) -> AgentReply:
        sampled, number, stop = node.messages[-1], node.number, request.stop if request else ()
        calls = [replace(call, id=id) for call, id in zip(sampled.tool_calls, self.tree.call_ids(number), strict=True)]
        id = f"{self._reply_ids}{number:04d}"
        ended: Finish = "tool_calls" if calls else "stop"
        finish: Finish = ended if self.tree.ended(number, stop) else "length"
        message = replace(sampled, tool_calls=tuple(calls))
        counts = (node.num_path_tokens - node.num_sampled, node.num_sampled, int(time.time()), cached)
        scored = self._log_probs(node) if request is not None and request.log_probs else ()
        return AgentReply(id, message, finish, *counts, self.tree.find_stop(number, stop), scored)

    def _log_probs(self, node: Node) -> tuple[tuple[str, float], ...]:
        """The sampled tokens as text, each with its log-prob."""
        said = node.tokens.part(len(node.tokens) - node.num_sampled, len(node.tokens))
        texts = [self._policy.renderer.codec.decode([token]) for token in said.token_ids.tolist()]
        return tuple(zip(texts, said.behavior_log_probs.tolist(), strict=True))

    def find_reply(self, id: str) -> AgentReply | None:
        """Find the reply that the session gave under this id. None: it gave none."""
        number = id.removeprefix(self._reply_ids)
        nodes = self.tree.nodes[int(number) :][:1] if number.isdecimal() else []
        replies = (self._make_reply(node, None, cached=0) for node in nodes if node.num_sampled)
        return next((reply for reply in replies if reply.id == id), None)

    def mark_delivered(self, reply: AgentReply) -> None:
        """Note that the agent, still connected, has all but the reply's end: it sends no request before the end."""
        self._mark_delivered(int(reply.id.removeprefix(self._reply_ids)))

    def _mark_delivered(self, number: int) -> None:
        if self.tree.nodes[number].status != Status.UNDELIVERED:
            return
        self.tree.delivered(number)
        if self._writer is not None:
            self._writer.store_delivery(self.id, number)

    async def count_tokens(self, request: AgentRequest) -> int:
        """Count the prompt's tokens. Raises BadRequest, RenderError."""
        await self._tokenize(request)
        return len(self.tree.prompt(request.messages, request.tools).ids)

    async def reward(self, rewards: Mapping[str, float], *, end: bool) -> None:
        """Take rewards by agent; the whole episode's has the empty name. `end` ends the episode. Raises BadRequest."""
        bad = next((agent for agent, reward in rewards.items() if not abs(reward) <= LARGEST_FLOAT32), None)
        if bad is not None:
            raise BadRequest(400, f"The reward must be a number that float32 can hold, got {rewards[bad]}.", "reward")
        self.rewards |= rewards
        if end:
            with suppress(InvalidStateError):  # somebody has ended it already
                self.ended.set_result(None)


def forgotten() -> BadRequest:
    return BadRequest(403, "The session must be one that is stored, got one that was forgotten.")


def _are_equal(one: AgentRequest, other: AgentRequest) -> bool:
    """True if two requests are written in the same way. Unlike in Python, 1 and true differ."""
    if (one.max_tokens, one.stop) != (other.max_tokens, other.stop):
        return False
    written = [(each.agent, each.aside, repr(each.messages), canonical_json(each.tools)) for each in (one, other)]
    return written[0] == written[1]
