"""A session's tree as rows: its training sequences, the segments of a trajectory.

Every path that is not part of a longer path is one training sequence. A reply that several sequences hold is trained in
the first of them:

    node 0    Find pearl. -> It is 78.
    node 1      goes on from node 0: Sure? -> Yes.
    node 2      goes on from node 0: And coral? -> 79.

    sequence 1    Find pearl. It is 78. Sure? Yes.          trained: It is 78. Yes.
    sequence 2    Find pearl. It is 78. And coral? 79.      trained: 79.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from context.authors import HISTORY, AuthorTable
from context.messages import Message
from context.tokens.session_nodes import Fork, Node, Path, messages_path_of, offered_tools, path_of
from context.tokens.token_sequence import Segment, SegmentReason, TokenSequence


def sequences_of(nodes: Sequence[Node]) -> dict[int, Path]:
    """The training sequences in the order of time, each by the node that it ends with."""
    holders = _holders(nodes)
    return {number: path_of(nodes, number, holders=holders) for number in _last_nodes(nodes, holders)}


def _last_nodes(nodes: Sequence[Node], holders: Sequence[int]) -> list[int]:
    """Find the last node of each training sequence.

    Every node is visited once, the latest first. Walking all paths would take quadratic time.
    """
    is_shown, goes_on = [node.is_trained for node in nodes], [False] * len(nodes)
    for node, before in zip(reversed(nodes), reversed(holders), strict=True):
        if is_shown[node.number] and before >= 0:
            is_shown[before] = True
            goes_on[before] |= node.place.kept_tokens == nodes[before].num_path_tokens
    return [node.number for node in nodes if node.is_trained and not goes_on[node.number]]


def _holders(nodes: Sequence[Node]) -> list[int]:
    """For each node its parent or the earlier node that holds the last token it keeps; -1: it keeps no token."""
    starts = [*(node.place.kept_tokens for node in nodes), -1]
    holders: list[int] = []
    for number, node in enumerate(nodes):
        at = -1 if node.place.parent is None else node.place.parent
        while starts[at] >= starts[number]:
            at = holders[at]
        holders.append(at)
    return holders


def trained_in(nodes: Sequence[Node]) -> dict[int, int]:
    """Node -> the training sequence in which its delivered reply is trained: the first that holds the whole reply."""
    found: dict[int, int] = {}
    for position, path in enumerate(sequences_of(nodes).values()):
        for number, count in path:
            if nodes[number].is_trained and count == len(nodes[number].tokens):
                found.setdefault(number, position)
    return found


def conversations_of(nodes: Sequence[Node]) -> Iterator[tuple[tuple[Message, ...], list[dict[str, Any]]]]:
    """The messages and tools of each training sequence. Replies that it only shows again have author `history`."""
    trained = trained_in(nodes)
    for position, last in enumerate(sequences_of(nodes)):
        said: list[Message] = []
        for number, count in messages_path_of(nodes, last):
            node = nodes[number]
            said += node.messages[:count]
            if node.num_sampled and count == len(node.messages) and trained.get(number) != position:
                said[-1] = replace(said[-1], author=HISTORY)
        yield tuple(said), offered_tools(nodes, last)


def segments_of(nodes: Sequence[Node], authors: AuthorTable) -> tuple[Segment, ...]:
    """The training sequences as segments. A reply that is trained in an earlier one has author `history`."""
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
