"""A session of an agent that sends whole conversations: which exact tokens each of its requests stands for."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from context.authors import HISTORY, INITIALIZATION
from context.messages import Message, ToolCall, canonical_json, content_hash, numbered_calls
from context.parse import Reply, ReplyParser
from context.templates.render import Renderer, Rendering
from context.tokens.session_nodes import (
    Fork,
    Node,
    Place,
    Status,
    conversation_of,
    path_of,
    shared_beginnings,
    tokens_of,
)
from context.tokens.token_sequence import TokenSequence
from context.tokens.training_sequence import TrainingControl, mark_untrained, sampled_tokens

_Tools = Sequence[Mapping[str, Any]]
_MOST_RENDERINGS = 8
"""Each is a whole conversation: all of them would be the square of a session."""


class _Key(NamedTuple):
    """What messages are told apart by."""

    role: str
    content: str
    name: str | None
    tool_call_id: str | None
    calls: str
    thought: str


@dataclass(frozen=True, eq=False)
class Prompt:
    """What the policy must see next."""

    tokens: TokenSequence
    """All of it, exactly."""
    given: tuple[Message, ...]
    """All of the conversation."""
    place: Place
    """As the tree was when it was asked."""
    rendering: Rendering
    asked_after: int
    """How many nodes there were."""
    repeats: int | None = None
    """The node whose reply to this very conversation was lost before it was delivered; None: there is none."""

    @property
    def ids(self) -> list[int]:
        ids: list[int] = self.tokens.token_ids.tolist()
        return ids

    @property
    def rest(self) -> TokenSequence:
        """What of it follows the tokens that it keeps of its parent's path."""
        return self.tokens.part(self.place.kept_tokens, len(self.tokens))

    @property
    def messages(self) -> tuple[Message, ...]:
        """What follows the messages that it keeps of its parent's conversation."""
        return self.given[self.place.kept_messages :]


class ConversationTree:
    """Messages choose the node, tokens stay what they were: what was sampled is never made from text again.

    A conversation that begins with all of a node's goes on from that node's tokens. Any other is rendered whole, and
    shares with the tree the tokens that both begin with. All of this follows from the nodes: a tree made of stored
    ones goes on as the one that made them.
    """

    def __init__(
        self,
        renderer: Renderer,
        parser: Callable[[_Tools], ReplyParser],
        *,
        now: datetime,
        control: TrainingControl | None = None,
        nodes: Sequence[Node] = (),
    ) -> None:
        """`parser` makes what reads replies, of the tools that are offered; `now`: what templates take for today, all
        session long."""
        self._renderer = renderer
        self._parser = parser
        self._now = now
        self._control = control or TrainingControl()
        self._numbers: dict[_Key, int] = {}
        """One for all messages that are alike."""
        self._said: list[npt.NDArray[np.int32]] = []
        """The numbers of each node's messages."""
        self._renderings: dict[int | None, Rendering] = {}
        """Prompts as the template writes them, by node: the last few that nothing goes on from."""
        self._said_by = lru_cache(64)(renderer.said)
        self._ids: set[str] = set()
        """Of calls, as the template has them."""
        self._called: dict[str, ToolCall] = {}
        """The calls of replies, by the ids that agents know."""
        self.nodes: list[Node] = []
        for node in nodes:
            self._append(node)

    def prompt(
        self,
        messages: Sequence[Message],
        tools: _Tools = (),
        *,
        agent: str = "",
        is_lost: Callable[[Node], bool] = lambda _: True,
    ) -> Prompt:
        """The exact tokens for a conversation. Raises RenderError for one that the template refuses, or cuts.

        `agent`: who asks; `is_lost`: whether an equal request may have the reply of a node that was not delivered.
        """
        given, numbers = self._read(messages)
        same, offered = self._same(numbers), content_hash(list(tools))
        equal = self._equal(same, len(given), offered)
        if equal:
            lost = (n for n in equal if self.nodes[n].status == Status.UNDELIVERED and is_lost(self.nodes[n]))
            rendering = self._renderings.get(equal[-1]) or self._renderer.render(given, tools, now=self._now)
            asked = self.nodes[equal[-1]].num_path_tokens - self.nodes[equal[-1]].num_sampled
            tokens = tokens_of(self.nodes, path_of(self.nodes, equal[-1])).part(0, asked)
            place = self._fork(tokens, same, offered, Fork.RETRY)
            return Prompt(tokens, given, place, rendering, len(self.nodes), next(lost, None))
        at = self._begun(same, len(given), agent)
        fork = self._why(at, same, given, offered)
        if at is not None and fork is None:
            going_on = self._going_on(at, given, tools)
            if going_on is not None:
                return going_on
        rendering = self._renderer.render(given, tools, now=self._now)
        tokens = self._renderer.tokens(rendering)
        place = self._fork(tokens, same, offered, fork or Fork.TEMPLATE)
        return Prompt(tokens, given, place, rendering, len(self.nodes))

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
        """A node with what the policy sampled for a prompt, verbatim, and the reply as it is read."""
        renderer = self._renderer
        sampled = sampled_tokens(token_ids, log_probs, policy_version, authors=renderer.authors)
        untrained = self._control.untrained(token_ids, renderer.codec, renderer.end_ids)
        sampled = mark_untrained(sampled, untrained, renderer.authors)
        reply = self._parsed(prompt.rendering, token_ids)
        if self._renderer.template.needs_call_ids:
            first = sum(len(message.tool_calls) for node in self.nodes for message in node.messages)
            calls = numbered_calls(reply.message.tool_calls, first)
            reply = replace(reply, message=replace(reply.message, tool_calls=calls))
        node = self._node(prompt, sampled, (reply.message,), agent=agent, status=status)
        self._append(node)
        if prompt.place.fork is None:
            self._renderings.pop(prompt.place.parent, None)
        kept = [*self._renderings.items(), (node.number, prompt.rendering)]
        self._renderings = dict(kept[-_MOST_RENDERINGS:])
        return node, reply

    def refuse(self, prompt: Prompt, *, agent: str = "") -> Node:
        """A node for a prompt that got no reply."""
        node = self._node(prompt, TokenSequence.concatenate([]), (), agent=agent, status=Status.REFUSED)
        self._append(node)
        return node

    def delivered(self, number: int) -> None:
        """The agent has been given a node's reply."""
        if self.nodes[number].status == Status.UNDELIVERED:
            self.nodes[number] = replace(self.nodes[number], status=Status.TRAINED)

    def ended(self, number: int) -> bool:
        """True: a stop token ended a node's reply, not a limit."""
        node = self.nodes[number]
        return node.num_sampled > 0 and self._said_by(_sampled_ids(node))[1]

    def call_ids(self, number: int) -> list[str]:
        """What an agent is told the calls of a node's reply by: an id each, even where the model's format has none."""
        calls = self.nodes[number].messages[-1].tool_calls
        return [call.id or f"{_GIVEN_ID}{number}_{place}" for place, call in enumerate(calls)]

    def _read(self, messages: Sequence[Message]) -> tuple[tuple[Message, ...], list[int]]:
        """The messages as the template is to have them: by their authors, results with their tool's name, and ids only
        where the model's format has any. And their numbers."""
        names = {call.id: call.name for message in messages for call in message.tool_calls}
        said = {numbers[-1] for node, numbers in zip(self.nodes, self._said, strict=True) if node.num_sampled}
        read = []
        for message in messages:
            calls = tuple(replace(self._as_said(call), id=self._id(call.id)) for call in message.tool_calls)
            name = message.name or (names.get(message.tool_call_id) if message.role == "tool" else None)
            read.append(replace(message, tool_calls=calls, name=name, tool_call_id=self._id(message.tool_call_id)))
        numbers = self._numbered(read)
        for place, message in enumerate(read):
            if message.role == "assistant":
                read[place] = replace(message, author=HISTORY if numbers[place] in said else INITIALIZATION)
        return tuple(read), numbers

    def _as_said(self, call: ToolCall) -> ToolCall:
        """A call of a reply as it was sampled, where its agent has only added arguments: its tool's defaults."""
        said = self._called.get(call.id or "", call)
        kept = {name: value for name, value in call.arguments.items() if name in said.arguments}
        added = len(kept) < len(call.arguments)
        return said if added and _call_key(replace(call, arguments=kept)) == _call_key(said) else call

    def _id(self, given: str | None) -> str | None:
        known = given in self._ids
        if given is None or known or not self._renderer.template.needs_call_ids:
            return given if known else None
        # In the form that Mistral's takes.
        return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]

    def _begun(self, same: Sequence[int], count: int, agent: str) -> int | None:
        """The node whose whole conversation is the longest beginning of one of `count` messages; of several, one
        whose reply is trained, then was delivered, then one that the agent itself asked for, then the latest."""
        whole = [
            node for node in self.nodes if node.num_sampled and same[node.number] == node.num_path_messages < count
        ]

        def rank(node: Node) -> tuple[int, bool, bool, bool, int]:
            is_given = node.status != Status.UNDELIVERED
            return same[node.number], node.is_trained, is_given, node.agent == agent, node.number

        return max(map(rank, whole))[-1] if whole else None

    def _why(self, at: int | None, same: Sequence[int], given: Sequence[Message], offered: str) -> Fork | None:
        """Why a conversation can't go on from node `at`; None: it can, as far as messages tell."""
        if at is not None:
            if self.nodes[at].place.tools != offered:
                return Fork.TOOLS
            return None if self.ended(at) else Fork.CUT
        nearest = max(range(len(same)), key=same.__getitem__, default=None)
        if nearest is None or not same[nearest]:
            return Fork.NEW
        if same[nearest] == len(given):
            return Fork.RETRY if self.nodes[nearest].place.tools == offered else Fork.TOOLS
        ours, theirs = (_key(said[same[nearest]]) for said in (conversation_of(self.nodes, nearest), given))
        return Fork.THINKING if ours.thought and ours._replace(thought=theirs.thought) == theirs else Fork.EDITED

    def _numbered(self, messages: Sequence[Message]) -> list[int]:
        """The messages' numbers; -1: the tree has none like it."""
        return [self._numbers.get(_key(message), -1) for message in messages]

    def _same(self, numbers: Sequence[int]) -> list[int]:
        """How many of the messages of these numbers each node's conversation begins with."""
        given, kept = np.array(numbers, np.int32), [node.place.kept_messages for node in self.nodes]
        return shared_beginnings(self.nodes, given, self._said, kept)

    def _equal(self, same: Sequence[int], count: int, offered: str) -> list[int]:
        """The nodes of equal requests."""
        return [
            node.number
            for node in self.nodes
            if same[node.number] == count == node.num_path_messages - bool(node.num_sampled)
            and node.place.tools == offered
        ]

    def _fork(self, tokens: TokenSequence, same: Sequence[int], offered: str, fork: Fork) -> Place:
        """The place of a prompt that goes on from no reply: behind the tokens that most of it shares with the tree."""
        own, kept = [node.tokens.token_ids for node in self.nodes], [node.place.kept_tokens for node in self.nodes]
        shared = [0, *shared_beginnings(self.nodes, tokens.token_ids, own, kept)]
        most = max(range(len(shared)), key=shared.__getitem__)
        parent, messages_kept = (most - 1, same[most - 1]) if most else (None, 0)
        return Place(parent, shared[most], messages_kept, offered, fork)

    def _going_on(self, at: int, given: tuple[Message, ...], tools: _Tools) -> Prompt | None:
        """The prompt behind a node's reply; None where the template rewrites what stands there."""
        node, said = self.nodes[at], self.nodes[at].num_path_messages
        before = self._renderings.get(at) or self._renderer.render(given[: said - 1], tools, now=self._now)
        grown = self._renderer.render(given, tools, after=before)
        reply, _ = self._said_by(_sampled_ids(node))
        rest = self._renderer.increment(before, grown, reply)
        if rest is None:
            return None
        path = tokens_of(self.nodes, path_of(self.nodes, at))
        place = Place(at, len(path), said, node.place.tools, None)
        return Prompt(TokenSequence.concatenate([path, rest]), given, place, grown, len(self.nodes))

    def _parsed(self, rendering: Rendering, token_ids: Sequence[int]) -> Reply:
        said, ended = self._said_by(tuple(token_ids))
        return self._parser(rendering.tools).parse(rendering.opened_thought + said.text, stopped=ended)

    def _node(
        self, prompt: Prompt, sampled: TokenSequence, reply: tuple[Message, ...], *, agent: str, status: Status
    ) -> Node:
        place = prompt.place
        if len(self.nodes) > prompt.asked_after:  # what begins alike may have been answered meanwhile
            same = self._same(self._numbered(prompt.given))
            fork = Fork.RETRY if self._equal(same, len(prompt.given), place.tools) else place.fork
            place = place if fork is None else self._fork(prompt.tokens, same, place.tools, fork)
            prompt = replace(prompt, place=place)
        tokens, messages = TokenSequence.concatenate([prompt.rest, sampled]), (*prompt.messages, *reply)
        shown = prompt.rendering.tools
        is_new = shown and all(node.place.tools != prompt.place.tools for node in self.nodes)
        offered = json.dumps(list(shown), ensure_ascii=False) if is_new else ""  # in the order that templates show
        return Node(len(self.nodes), prompt.place, tokens, len(sampled), messages, status, agent, offered)

    def _append(self, node: Node) -> None:
        self.nodes.append(node)
        if node.place.fork is None and node.place.parent is not None:
            self.delivered(node.place.parent)  # also where it was lost who had been given it
        keys = map(_key, node.messages)
        self._said.append(np.array([self._numbers.setdefault(key, len(self._numbers)) for key in keys], np.int32))
        if node.num_sampled:
            self._called |= zip(self.call_ids(node.number), node.messages[-1].tool_calls, strict=True)
        self._ids |= {call.id for message in node.messages for call in message.tool_calls if call.id is not None}


_GIVEN_ID = "call_"


def _key(message: Message) -> _Key:
    calls = canonical_json(list(map(_call_facts, message.tool_calls))) if message.tool_calls else ""
    return _Key(message.role, message.content, message.name, message.tool_call_id, calls, message.reasoning or "")


def _call_key(call: ToolCall) -> str:
    return canonical_json(_call_facts(call))


def _call_facts(call: ToolCall) -> list[Any]:
    return [call.name, _alike(dict(call.arguments))]


def _alike(value: Any) -> Any:
    """JSON with whole numbers in one form: programs write 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _alike(inner) for name, inner in value.items()}
    return [_alike(inner) for inner in value] if isinstance(value, list) else value


def _sampled_ids(node: Node) -> tuple[int, ...]:
    return tuple(node.tokens.token_ids[len(node.tokens) - node.num_sampled :].tolist())
