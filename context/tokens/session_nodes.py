"""An agent's session at rest: a tree of exact tokens, and the training sequences that follow from it."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from context.authors import HISTORY, AuthorTable
from context.messages import Message
from context.tokens.token_sequence import Segment, SegmentReason, TokenSequence


class Status(StrEnum):
    """What became of a reply."""

    TRAINED = "trained"  # the agent was given it
    UNDELIVERED = "undelivered"  # the agent had gone before it was there, and never asked again
    ASIDE = "aside"  # the agent asked for it beside its task: answered, and never trained
    REFUSED = "refused"  # there is none: the prompt had no room for it, or the engine failed


class Fork(StrEnum):
    """Why a prompt does not go on from a reply that ended its turn."""

    NEW = "new"  # it has nothing in common with what was asked before
    RETRY = "retry"  # the same was asked again
    EDITED = "edited"  # an earlier message is another one now
    THINKING = "thinking"  # the agent left out what a reply had thought
    TOOLS = "tools"  # other tools are offered
    CUT = "cut"  # the reply that it goes on from reached its limit on tokens
    TEMPLATE = "template"  # the chat template writes otherwise what stood there before


@dataclass(frozen=True)
class Place:
    """Where a request stands in the tree: it shares the beginning of its parent's path, and goes on from there."""

    parent: int | None
    """The node that it shares its beginning with; None: it shares it with none."""
    kept_tokens: int
    """How many of the parent's path are the beginning of its own."""
    kept_messages: int
    """How many of the parent's conversation are the beginning of its own."""
    tools: str
    """Hash of the tools that the prompt shows."""
    fork: Fork | None
    """None: it goes on behind its parent's reply."""


@dataclass(frozen=True, eq=False)
class Node:
    """One request of an agent with the reply to it."""

    number: int
    """Its index in the session, in the order of time."""
    place: Place
    tokens: TokenSequence
    """What follows the kept tokens: the rest of the prompt, and the reply."""
    num_sampled: int
    """How many of these, the last ones, are the reply."""
    messages: tuple[Message, ...]
    """What follows the kept messages, the reply last if there is one."""
    status: Status
    agent: str = ""
    """Who asked, as the agent calls itself; empty where it does not say."""
    offered: str = ""
    """The tools that its prompt shows, as JSON; empty where there are none, or an earlier node has the same ones."""

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
"""Which nodes a path is made of, and how much of each, from the root on."""
_KEPT_TOKENS, _KEPT_MESSAGES = attrgetter("place.kept_tokens"), attrgetter("place.kept_messages")


def path_of(nodes: Sequence[Node], number: int) -> Path:
    """Tokens that the policy had seen and said once it had given a node's reply."""
    return _path(nodes, number, nodes[number].num_path_tokens, _KEPT_TOKENS)


def tokens_of(nodes: Sequence[Node], path: Path) -> TokenSequence:
    return TokenSequence.concatenate(nodes[number].tokens.part(0, count) for number, count in path)


def conversation_of(nodes: Sequence[Node], number: int) -> tuple[Message, ...]:
    """The messages behind the path of a node."""
    return tuple(said for part, count in _messages_path(nodes, number) for said in nodes[part].messages[:count])


def _messages_path(nodes: Sequence[Node], number: int) -> Path:
    return _path(nodes, number, nodes[number].num_path_messages, _KEPT_MESSAGES)


def _path(
    nodes: Sequence[Node], number: int, end: int, kept: Callable[[Node], int], holders: Sequence[int] | None = None
) -> Path:
    """The first `end` tokens or messages of a node's path, of which it has `kept` from the nodes before it."""
    found: list[tuple[int, int]] = []
    at: int | None = number
    while at is not None and end:
        start = kept(nodes[at])
        if end > start:
            found.append((at, end - start))
        at, end = nodes[at].place.parent if holders is None else holders[at], min(end, start)
    return found[::-1]


def shared_beginnings(nodes: Sequence[Node], given: npt.NDArray[np.int32]) -> list[int]:
    """How many of these token ids the path of each node begins with."""
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
    """The nodes of a session; raises ValueError where one does not stand on those before it."""
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


def sequences_of(nodes: Sequence[Node]) -> dict[int, Path]:
    """Paths that no longer one holds, by the node they end with, in the order of time: the training sequences."""
    holders = _holders(nodes)
    return {
        number: _path(nodes, number, nodes[number].num_path_tokens, _KEPT_TOKENS, holders)
        for number in _last_nodes(nodes, holders)
    }


def num_sequence_tokens(nodes: Sequence[Node]) -> int:
    """How many tokens the training sequences have: a beginning that several share counts in each."""
    return sum(nodes[number].num_path_tokens for number in _last_nodes(nodes, _holders(nodes)))


def _last_nodes(nodes: Sequence[Node], holders: Sequence[int]) -> list[int]:
    """Of each training sequence. One look at every node, the latest first: to walk all paths is the square of it."""
    is_shown, goes_on = [node.is_trained for node in nodes], [False] * len(nodes)
    for node, before in zip(reversed(nodes), reversed(holders), strict=True):
        if is_shown[node.number] and before >= 0:
            is_shown[before] = True
            goes_on[before] |= node.place.kept_tokens == nodes[before].num_path_tokens
    return [node.number for node in nodes if node.is_trained and not goes_on[node.number]]


def _holders(nodes: Sequence[Node]) -> list[int]:
    """The node that holds the last of the tokens that each one keeps; -1: it keeps none.

    That is its parent, or one before it, to which long ways are jumped (Myers 1983, "An applicative random-access
    stack"): a file may hang thousands of requests from the end of a long session that all keep its first token alone.
    """
    starts = [*(node.place.kept_tokens for node in nodes), -1]
    holders, jumps, depths = ([value] * len(starts) for value in (-1, -1, 0))
    for number, node in enumerate(nodes):
        at, kept = -1 if node.place.parent is None else node.place.parent, starts[number]
        while starts[at] >= kept:
            at = jumps[at] if starts[jumps[at]] >= kept else holders[at]
        over = jumps[at]
        is_even = depths[at] - depths[over] == depths[over] - depths[jumps[over]]
        holders[number], jumps[number], depths[number] = at, jumps[over] if is_even else at, depths[at] + 1
    return holders[:-1]


def trained_in(nodes: Sequence[Node]) -> dict[int, int]:
    """The number of the training sequence in which each delivered reply is trained: the first that holds all of it."""
    found: dict[int, int] = {}
    for position, path in enumerate(sequences_of(nodes).values()):
        for number, count in path:
            if nodes[number].is_trained and count == len(nodes[number].tokens):
                found.setdefault(number, position)
    return found


def tools_of(nodes: Sequence[Node], number: int) -> list[dict[str, Any]]:
    shown = nodes[number].place.tools
    found: list[dict[str, Any]] = json.loads(
        next((node.offered for node in nodes if node.offered and node.place.tools == shown), "[]")
    )
    return found


def conversations_of(nodes: Sequence[Node]) -> Iterator[tuple[tuple[Message, ...], list[dict[str, Any]]]]:
    """The messages and tools of each training sequence; replies that it only shows again are of author `history`."""
    trained = trained_in(nodes)
    for position, last in enumerate(sequences_of(nodes)):
        said: list[Message] = []
        for number, count in _messages_path(nodes, last):
            node = nodes[number]
            said += node.messages[:count]
            if node.num_sampled and count == len(node.messages) and trained.get(number) != position:
                said[-1] = replace(said[-1], author=HISTORY)
        yield tuple(said), tools_of(nodes, last)


def segments_of(nodes: Sequence[Node], authors: AuthorTable) -> tuple[Segment, ...]:
    """The training sequences. A delivered reply is trained in one, and shown again in others: author `history`."""
    trained = trained_in(nodes)
    segments: list[Segment] = []
    for position, (number, path) in enumerate(sequences_of(nodes).items()):
        shown = (_shown(nodes[part], count, authors, trained=trained.get(part) == position) for part, count in path)
        tokens = TokenSequence.concatenate(shown)
        segments.append(Segment(tokens, _reason(nodes[number], first=not segments)))
    return tuple(segments)


def _shown(node: Node, count: int, authors: AuthorTable, *, trained: bool) -> TokenSequence:
    tokens, prompt = node.tokens.part(0, count), len(node.tokens) - node.num_sampled
    if trained or count <= prompt:
        return tokens
    shown = TokenSequence.constant(tokens.token_ids[prompt:].tolist(), authors.code(HISTORY))
    return TokenSequence.concatenate([tokens.part(0, prompt), shown])


def _reason(node: Node, *, first: bool) -> SegmentReason:
    if first:
        return "clean"
    return "template_rewrite" if node.place.fork == Fork.TEMPLATE else "fork"
