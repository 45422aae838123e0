"""Finds the exact tokens of each request of an agent that sends whole conversations.

    request 1    Find pearl.                        -> tokens A, the policy samples B: It  is 78.
    request 2    Find pearl. It  is 78. Sure?       -> tokens A, B, and new tokens for: Sure?

The messages of request 2 begin with the messages of request 1 and its reply. So request 2 continues from the sampled
tokens B, which are never made from text again.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, Self

from context.authors import HISTORY, INITIALIZATION
from context.messages import Message, ToolCall, are_like, call_facts, content_hash, numbered_calls
from context.parse import Reply, ReplyParser
from context.templates.render import Renderer
from context.templates.rendering.conversation_writer import Rendering
from context.tokens.loss_mask import behind_the_end, mark_untrained
from context.tokens.session_nodes import Fork, Node, Place, Status, path_of, shared_beginnings, tokens_of
from context.tokens.token_sequence import TokenSequence
from context.tokens.training_sequence import sampled_tokens

_Tools = Sequence[Mapping[str, Any]]
_Stop = tuple[str, ...]
INSTRUCTION = "\n\nInstruction: "
"""Begins what a session adds to an agent's message. The agent sends the message back without it."""
_MOST_RENDERINGS = 8
"""Renderings that are kept. Each is a whole conversation: to keep all would take the square of a session."""


class _Key(NamedTuple):
    """The parts of a message by which it differs from others."""

    role: str
    content: str
    name: str | None
    tool_call_id: str | None
    calls: str
    thought: str


@dataclass(eq=False)
class _Beginning:
    """The first messages of conversations that were answered."""

    before: Self | None
    """The beginning without its last message."""
    length: int
    next: dict[_Key, Self] = field(default_factory=dict)
    """The beginnings that are one message longer, by that message."""
    asked: list[int] = field(default_factory=list)
    """The nodes whose whole request this is."""
    said: list[int] = field(default_factory=list)
    """The nodes whose request and reply this is."""

    def back(self) -> Iterator[Self]:
        """This beginning and each shorter one, down to nothing."""
        at: Self | None = self
        while at is not None:
            yield at
            at = at.before


@dataclass(frozen=True, eq=False)
class Prompt:
    """The prompt that the policy must see next."""

    tokens: TokenSequence
    """All tokens, exactly."""
    given: tuple[Message, ...]
    """The whole conversation."""
    place: Place
    """Its place in the tree at the time of the request."""
    rendering: Rendering
    stop: _Stop
    """The texts that end the reply, besides the policy's own."""
    asked_after: int
    """The number of nodes at the time of the request."""
    repeats: int | None = None
    """The node whose reply to an equal request was lost before it was delivered. None: there is none."""
    follows: int | None = None
    """The node of the last reply in the conversation, with its thought or without: its agent has been given it. None:
    the conversation holds no reply of the tree."""

    @property
    def ids(self) -> list[int]:
        ids: list[int] = self.tokens.token_ids.tolist()
        return ids

    @property
    def rest(self) -> TokenSequence:
        """The tokens after the shared beginning of the parent's path."""
        return self.tokens.part(self.place.kept_tokens, len(self.tokens))

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages after the shared beginning of the parent's conversation."""
        return self.given[self.place.kept_messages :]


class ConversationTree:
    """The conversations of a session: messages choose the node, and the node's tokens stay what they were.

    A conversation that begins with the whole of a node's goes on from that node's tokens. Any other conversation is
    rendered whole, and shares its first tokens with the tree. A request without a reply is kept, but no conversation
    goes on from it. A tree that is made of stored nodes goes on as the tree that stored them.
    """

    def __init__(
        self,
        renderer: Renderer,
        parser: Callable[[_Tools], ReplyParser],
        *,
        now: datetime,
        nodes: Sequence[Node] = (),
    ) -> None:
        """`parser` makes the reader of replies for the offered tools. `now`: the day that templates take for today."""
        self._renderer = renderer
        self._parser = parser
        self._now = now
        self._nothing = _Beginning(None, 0)
        self._ends: list[_Beginning] = []
        """Each node's whole conversation. Without a reply, it is the part that the node keeps of its parent's."""
        self._replies: set[_Key] = set()
        self._renderings: dict[int | None, Rendering] = {}
        """The prompts of the last few nodes that no other node goes on from, as the template writes them."""
        self._said_by = lru_cache(64)(renderer.said)
        self._ids: set[str] = set()
        """The ids of calls, as the template has them."""
        self.nodes: list[Node] = []
        for node in nodes:
            self._append(node)

    def prompt(
        self,
        messages: Sequence[Message],
        tools: _Tools = (),
        *,
        agent: str = "",
        stop: _Stop = (),
        is_lost: Callable[[Node], bool] = lambda _: True,
    ) -> Prompt:
        """The exact tokens for a conversation. Raises RenderError where the template refuses it, or leaves parts out.

        `agent`: who asks. `stop`: texts that end the reply, and ended the one that the request continues. `is_lost`:
        whether an equal request may be given the undelivered reply of a node.
        """
        given, most = self._read_messages(messages, stop)
        offered = content_hash(list(tools))
        equal = self._find_equal_requests(most, len(given), offered)
        if equal:
            lost = (n for n in equal if self.nodes[n].status == Status.UNDELIVERED and is_lost(self.nodes[n]))
            rendering = self._renderings.get(equal[-1]) or self._renderer.render(given, tools, now=self._now)
            asked = self.nodes[equal[-1]].num_path_tokens - self.nodes[equal[-1]].num_sampled
            tokens = tokens_of(self.nodes, path_of(self.nodes, equal[-1])).part(0, asked)
            place = self._make_fork(tokens, most, offered, Fork.RETRY)
            return Prompt(tokens, given, place, rendering, stop, len(self.nodes), next(lost, None))
        at = self._choose_node(next((one for one in most.back() if one.said and one.length < len(given)), None), agent)
        fork = self._find_fork(at, most, given, offered, stop)
        going_on = None if at is None or fork in (Fork.TOOLS, Fork.CUT) else self._continue_from(at, given, tools, stop)
        if going_on is not None and fork is None:
            return going_on
        rendering = going_on.rendering if going_on else self._renderer.render(given, tools, now=self._now)
        tokens = going_on.tokens if going_on else self._renderer.tokens(rendering)
        place = self._make_fork(tokens, most, offered, fork or Fork.TEMPLATE)
        follows = self._choose_node(self._find_without_thought(most, given), agent) if fork == Fork.THINKING else at
        return Prompt(tokens, given, place, rendering, stop, len(self.nodes), None, follows)

    def add(
        self,
        prompt: Prompt,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        *,
        policy_version: int | Sequence[int],
        agent: str = "",
        status: Status = Status.UNDELIVERED,
    ) -> tuple[Node, Reply]:
        """Adds a node with exactly the sampled tokens. Returns the node, and the reply as it is read."""
        renderer = self._renderer
        sampled = sampled_tokens(token_ids, log_probs, policy_version, authors=renderer.authors)
        sampled = mark_untrained(sampled, behind_the_end(token_ids, renderer.end_ids), renderer.authors)
        said, ended = self._said_by(tuple(token_ids), prompt.stop)
        parser = self._parser(prompt.rendering.tools)
        reply = parser.parse(prompt.rendering.opened_thought + said.text, stopped=ended)
        if self._renderer.template.needs_call_ids:
            first = sum(len(message.tool_calls) for node in self.nodes for message in node.messages)
            calls = numbered_calls(reply.message.tool_calls, first)
            reply = replace(reply, message=replace(reply.message, tool_calls=calls))
        node = self._make_node(prompt, sampled, (reply.message,), agent=agent, status=status)
        self._append(node)
        if prompt.place.fork is None:
            self._renderings.pop(prompt.place.parent, None)
        kept = [*self._renderings.items(), (node.number, prompt.rendering)]
        self._renderings = dict(kept[-_MOST_RENDERINGS:])
        return node, reply

    def refuse(self, prompt: Prompt, *, agent: str = "") -> Node:
        """Adds a node for a prompt that got no reply."""
        node = self._make_node(prompt, TokenSequence.concatenate([]), (), agent=agent, status=Status.REFUSED)
        self._append(node)
        return node

    def delivered(self, number: int) -> None:
        """Notes that the agent has been given a node's reply."""
        if self.nodes[number].status == Status.UNDELIVERED:
            self.nodes[number] = replace(self.nodes[number], status=Status.TRAINED)

    def ended(self, number: int, stop: _Stop = ()) -> bool:
        """True: a stop token or a text of `stop` ended the node's reply, and no limit did."""
        node = self.nodes[number]
        return node.num_sampled > 0 and self._said_by(_sampled_ids(node), stop)[1]

    def find_stop(self, number: int, stop: _Stop) -> str | None:
        """The text of `stop` that ended the node's reply. None: something else did."""
        ids = _sampled_ids(self.nodes[number])
        said, text = self._said_by(ids, stop)[0].text, self._renderer.codec.decode(ids, opens=True)
        return next((one for one in stop if text.startswith(one, len(said))), None)

    def call_ids(self, number: int) -> list[str]:
        """The ids by which the agent knows the calls of a node's reply, even where the model's format has none."""
        calls = self.nodes[number].messages[-1].tool_calls
        return [call.id or f"call_{number}_{place}" for place, call in enumerate(calls)]

    def _read_messages(self, messages: Sequence[Message], stop: _Stop) -> tuple[tuple[Message, ...], _Beginning]:
        """The messages as the template needs them, and their longest beginning that the tree already has.

        Messages get their authors, and results the names of their tools. Ids stay if the model's format has ids. A
        result answers the last call with its id, because some agents use the same ids in each turn.
        """
        called: dict[str | None, ToolCall] = {}
        read: list[Message] = []
        most = self._nothing
        here: _Beginning | None = most
        for message, following in zip(messages, [*messages[1:], None], strict=True):
            message = _as_shown(message, here, following, stop)
            if message.tool_calls:
                calls = self._find_said_calls(message.tool_calls, here.asked if here else ())
                calls = calls or tuple(replace(call, id=self._find_id(call.id)) for call in message.tool_calls)
                called |= {given.id: call for given, call in zip(message.tool_calls, calls, strict=True)}
                message = replace(message, tool_calls=calls)
            if message.role == "tool":
                call = called.get(message.tool_call_id)
                name, id = (None, self._find_id(message.tool_call_id)) if call is None else (call.name, call.id)
                message = replace(message, name=message.name or name, tool_call_id=id)
            key = _key(message)
            if message.role == "assistant":
                message = replace(message, author=HISTORY if key in self._replies else INITIALIZATION)
            read.append(message)
            here = here.next.get(key) if here else None
            most = here or most
        return tuple(read), most

    def _find_said_calls(self, given: Sequence[ToolCall], nodes: Sequence[int]) -> tuple[ToolCall, ...] | None:
        """The calls as a reply of these nodes has them. None: no reply has them.

        An agent may give calls other ids, and add arguments: the defaults of its tools.
        """

        def rank(number: int) -> tuple[bool, bool, int]:
            as_given = self.call_ids(number) == [call.id for call in given]
            return call_facts(given) == call_facts(self.nodes[number].messages[-1].tool_calls), as_given, number

        like = [number for number in nodes if are_like(given, self.nodes[number].messages[-1].tool_calls)]
        return self.nodes[max(like, key=rank)].messages[-1].tool_calls if like else None

    def _find_id(self, given: str | None) -> str | None:
        known = given in self._ids
        if given is None or known or not self._renderer.template.needs_call_ids:
            return given if known else None
        # Mistral's template takes ids of this form.
        return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]

    def _choose_node(self, whole: _Beginning | None, agent: str) -> int | None:
        """The best node with this whole conversation: one that is trained, then delivered, then of this agent, then the
        latest."""

        def rank(number: int) -> tuple[bool, bool, bool, int]:
            node = self.nodes[number]
            return node.is_trained, node.status != Status.UNDELIVERED, node.agent == agent, number

        return max(whole.said, key=rank, default=None) if whole else None

    def _find_fork(
        self, at: int | None, most: _Beginning, given: Sequence[Message], offered: str, stop: _Stop
    ) -> Fork | None:
        """Why a conversation can't go on from node `at`, or only with replies made from text again. None: it can, as
        far as messages tell. `most`: the part of the conversation that the tree has."""
        if at is not None:
            if self.nodes[at].place.tools != offered:
                return Fork.TOOLS
            if not self.ended(at, stop):
                return Fork.CUT
            behind = [said for said in given[self._ends[at].length :] if said.role == "assistant"]
            if not any(self._ends[at].next or said.author == HISTORY for said in behind):
                return None
        if not most.length:
            return Fork.NEW
        if most.length == len(given):
            return Fork.TOOLS if most.asked else Fork.RETRY
        return Fork.EDITED if self._find_without_thought(most, given) is None else Fork.THINKING

    def _find_without_thought(self, most: _Beginning, given: Sequence[Message]) -> _Beginning | None:
        """The known beginning that differs from the conversation only in the thought of its last message."""
        theirs = _key(given[most.length])
        same = (one for key, one in most.next.items() if key.thought and key._replace(thought=theirs.thought) == theirs)
        return next(same, None)

    def _find_equal_requests(self, most: _Beginning, count: int, offered: str) -> list[int]:
        """The nodes of requests with these messages and tools."""
        asked = most.asked if most.length == count else ()
        return [number for number in asked if self.nodes[number].place.tools == offered]

    def _make_fork(self, tokens: TokenSequence, most: _Beginning, offered: str, fork: Fork) -> Place:
        """The place of a prompt that goes on from no reply: behind the node that shares most tokens with it."""
        shared = shared_beginnings(self.nodes, tokens.token_ids)
        alike = [node.number for node in self.nodes if node.num_sampled and shared[node.number]]
        if not alike:
            return Place(None, 0, 0, offered, fork)
        parent = max(alike, key=shared.__getitem__)
        theirs = set(self._ends[parent].back())
        return Place(parent, shared[parent], next(one for one in most.back() if one in theirs).length, offered, fork)

    def _continue_from(self, at: int, given: tuple[Message, ...], tools: _Tools, stop: _Stop) -> Prompt | None:
        """The prompt that goes on from a node's reply. None: the template rewrites earlier text."""
        node, said = self.nodes[at], self.nodes[at].num_path_messages
        before = self._renderings.get(at) or self._renderer.render(given[: said - 1], tools, now=self._now)
        grown = self._renderer.render(given, tools, after=before)
        reply, _ = self._said_by(_sampled_ids(node), stop)
        rest = self._renderer.increment(before, grown, reply)
        if rest is None:
            return None
        path = tokens_of(self.nodes, path_of(self.nodes, at))
        place = Place(at, len(path), said, node.place.tools, None)
        return Prompt(TokenSequence.concatenate([path, rest]), given, place, grown, stop, len(self.nodes), None, at)

    def _make_node(
        self, prompt: Prompt, sampled: TokenSequence, reply: tuple[Message, ...], *, agent: str, status: Status
    ) -> Node:
        place = prompt.place
        if len(self.nodes) > prompt.asked_after:  # a request with an equal beginning may have been answered meanwhile
            _, most = self._read_messages(prompt.given, prompt.stop)
            fork = Fork.RETRY if self._find_equal_requests(most, len(prompt.given), place.tools) else place.fork
            place = place if fork is None else self._make_fork(prompt.tokens, most, place.tools, fork)
            prompt = replace(prompt, place=place)
        tokens, messages = TokenSequence.concatenate([prompt.rest, sampled]), (*prompt.messages, *reply)
        shown = prompt.rendering.tools
        is_new = shown and all(node.place.tools != prompt.place.tools for node in self.nodes)
        offered = json.dumps(list(shown), ensure_ascii=False) if is_new else ""  # in the order that templates show
        return Node(len(self.nodes), prompt.place, tokens, len(sampled), messages, status, agent, offered)

    def _append(self, node: Node) -> None:
        self.nodes.append(node)
        if node.place.fork is None and node.place.parent is not None:
            self.delivered(node.place.parent)  # who goes on from a reply has been given it
        end = self._nothing if node.place.parent is None else self._ends[node.place.parent]
        end = next(one for one in end.back() if one.length <= node.place.kept_messages)
        if node.num_sampled:
            for key in map(_key, node.messages):
                asked, end = end, end.next.setdefault(key, _Beginning(end, end.length + 1))
            asked.asked.append(node.number)
            end.said.append(node.number)
            self._replies.add(key)
        self._ends.append(end)
        self._ids |= {call.id for message in node.messages for call in message.tool_calls if call.id is not None}


def _key(message: Message) -> _Key:
    calls = call_facts(message.tool_calls)
    return _Key(message.role, message.content, message.name, message.tool_call_id, calls, message.reasoning or "")


def _as_shown(message: Message, here: _Beginning | None, following: Message | None, stop: _Stop) -> Message:
    """The message as it stands in the tree: with its instruction, or without the text of `stop` that ended the reply
    and that the agent has put back. `following` chooses, where several messages could be meant."""
    if here is None or following is None:
        return message

    def is_alike(shown: str) -> bool:
        if message.role == "assistant":
            return message.content in [shown + text for text in stop]
        return shown.startswith(message.content + INSTRUCTION)

    alike = [key for key in here.next if key.role == message.role and is_alike(key.content)]
    if not alike:
        return message
    own, behind, known = _key(message), _key(following), here.next
    meant = [own, *(key for key in alike if key._replace(content=own.content) == own)]
    best = max(meant, key=lambda key: (key in known and behind in known[key].next, key in known))
    return replace(message, content=best.content)


def _sampled_ids(node: Node) -> tuple[int, ...]:
    return tuple(node.tokens.token_ids[len(node.tokens) - node.num_sampled :].tolist())
