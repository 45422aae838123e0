"""An agent's session as a tree of exact tokens: one node for each request, with the reply to it.

    node 0    <|user|>Find pearl.<|end|><|assistant|> It is 78.<|end|>
    node 1      keeps all of node 0, and adds     <|user|>Sure?<|end|><|assistant|> Yes.<|end|>
    node 2      keeps <|user|> alone, and adds    Find coral.<|end|><|assistant|> It is 79.<|end|>

The training sequences that follow from a tree are in `session_segments`.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from context.messages import Message
from context.tokens.token_sequence import TokenSequence


class Status(StrEnum):
    """The fate of a reply."""

    TRAINED = "trained"  # the agent received the reply
    UNDELIVERED = "undelivered"  # the agent was gone when the reply came, and never asked again
    ASIDE = "aside"  # the agent asked outside its task: the reply is never trained
    REFUSED = "refused"  # there is no reply: the prompt left no room for one, or the engine failed


class Fork(StrEnum):
    """The reason why a prompt does not continue a reply that ended its turn."""

    NEW = "new"  # it has nothing in common with earlier requests
    RETRY = "retry"  # an equal request was made before
    EDITED = "edited"  # an earlier message has changed
    THINKING = "thinking"  # the agent left out the thought of a reply
    TOOLS = "tools"  # other tools are offered
    CUT = "cut"  # the reply before the prompt reached its limit on tokens
    TEMPLATE = "template"  # the chat template writes the earlier messages in another way


@dataclass(frozen=True)
class Place:
    """The place of a request in the tree. The request shares the beginning of its parent's path."""

    parent: int | None
    """The node whose path begins like the request. None: no path begins so."""
    kept_tokens: int
    """How many tokens the request shares with the parent's path."""
    kept_messages: int
    """How many messages the request shares with the parent's conversation."""
    tools: str
    """Hash of the tools that the prompt shows."""
    fork: Fork | None
    """None: the request continues its parent's reply."""


@dataclass(frozen=True, eq=False)
class Node:
    """One request of an agent, with its reply."""

    number: int
    """Its index in the session, in the order of time."""
    place: Place
    tokens: TokenSequence
    """The tokens after the kept tokens: the rest of the prompt, and the reply."""
    num_sampled: int
    """How many of `tokens`, from their end, are the reply."""
    messages: tuple[Message, ...]
    """The messages after the kept messages. The reply is the last, if there is one."""
    status: Status
    agent: str = ""
    """The name that the agent gives itself; empty where it gives none."""
    offered: str = ""
    """The tools in the prompt, as JSON. Empty: there are none, or an earlier node has these tools."""

    @property
    def num_path_tokens(self) -> int:
        return self.place.kept_tokens + len(self.tokens)

    @property
    def num_path_messages(self) -> int:
        return self.place.kept_messages + len(self.messages)

    @property
    def is_trained(self) -> bool:
        return self.status == Status.TRAINED


Path = Sequence[tuple[int, int]]
"""The nodes of a path from the root on, each with the number of its tokens or messages in the path."""
_KEPT_TOKENS, _KEPT_MESSAGES = attrgetter("place.kept_tokens"), attrgetter("place.kept_messages")


def path_of(nodes: Sequence[Node], number: int, *, holders: Sequence[int] | None = None) -> Path:
    """Find the path of all tokens that the policy has seen and sampled by the end of a node's reply.

    `holders` is a shortcut: for each node, the node that has the last of its kept tokens. None: go parent by parent.
    """
    return _path(nodes, number, nodes[number].num_path_tokens, _KEPT_TOKENS, holders)


def tokens_of(nodes: Sequence[Node], path: Path) -> TokenSequence:
    return TokenSequence.concatenate(nodes[number].tokens.part(0, count) for number, count in path)


def conversation_of(nodes: Sequence[Node], number: int) -> tuple[Message, ...]:
    """Return the whole conversation, up to and with a node's reply."""
    return tuple(said for part, count in messages_path_of(nodes, number) for said in nodes[part].messages[:count])


def messages_path_of(nodes: Sequence[Node], number: int) -> Path:
    """Find the path of a node, counted in messages."""
    return _path(nodes, number, nodes[number].num_path_messages, _KEPT_MESSAGES)


def _path(
    nodes: Sequence[Node], number: int, end: int, kept: Callable[[Node], int], holders: Sequence[int] | None = None
) -> Path:
    """Find the first `end` tokens or messages of a node's path. `kept(node)`: how many precede the node's own."""
    found: list[tuple[int, int]] = []
    at: int | None = number
    while at is not None and end:
        start = kept(nodes[at])
        if end > start:
            found.append((at, end - start))
        at, end = nodes[at].place.parent if holders is None else holders[at], min(end, start)
    return found[::-1]


def shared_beginnings(nodes: Sequence[Node], given: npt.NDArray[np.int32]) -> list[int]:
    """Count for each node the tokens at the start of its path that equal `given`."""
    found: list[int] = []
    for node in nodes:
        held, start = node.tokens.token_ids, node.place.kept_tokens
        if node.place.parent is not None and found[node.place.parent] < start:
            found.append(found[node.place.parent])
        else:
            there = given[start : start + len(held)]
            differ = np.flatnonzero(there != held[: len(there)])
            found.append(min(start, len(given)) + (int(differ[0]) if len(differ) else len(there)))
    return found


def checked_nodes(nodes: Iterable[Node], *, with_messages: bool = True) -> tuple[Node, ...]:
    """The nodes of a session. Raises ValueError for a node that does not fit the nodes before it."""
    found: list[Node] = []
    for node in nodes:
        at, number, sampled = node.place, len(found), node.num_sampled
        parent = None if at.parent is None or not 0 <= at.parent < number else found[at.parent]
        tokens, messages = (0, 0) if parent is None else (parent.num_path_tokens, parent.num_path_messages)
        wrong = {
            "number": node.number != number,
            "parent": at.parent is not None and parent is None,
            "kept_tokens": not 0 <= at.kept_tokens <= tokens,
            "kept_messages": with_messages and not 0 <= at.kept_messages <= messages,
            "num_sampled": not 0 <= sampled <= len(node.tokens)
            or (with_messages and bool(sampled) > len(node.messages)),
        }
        if any(wrong.values()):
            raise ValueError(f"nodes[{number}].{next(filter(wrong.get, wrong))} must fit the nodes before it.")
        found.append(node)
    return tuple(found)


def offered_tools(nodes: Sequence[Node], number: int) -> list[dict[str, Any]]:
    """The tools in the prompt of a node."""
    shown = nodes[number].place.tools
    found: list[dict[str, Any]] = json.loads(
        next((node.offered for node in nodes if node.offered and node.place.tools == shown), "[]")
    )
    return found
