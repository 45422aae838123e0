"""The session of an agent that asks by a base URL: its requests in their order, and how each begins."""

from collections.abc import Sequence
from itertools import accumulate

from context.tokens.session_nodes import Fork, Node, trained_in
from replay.questions.filters.query import QueryResult


def requests_of(nodes: Sequence[Node]) -> list[QueryResult]:
    """A line per request. `begins`: what it goes on from, or why it forks. `segment`: the training sequence in which
    its reply is trained; None: it is in none. `first_message`: where its messages begin among those of all."""
    sequence = trained_in(nodes)
    starts = accumulate((len(node.messages) for node in nodes), initial=0)
    return [
        {
            "number": node.number,
            "agent": node.agent,
            "status": str(node.status),
            "begins": _begins(node),
            "lanes": lanes,
            "parent": node.place.parent,
            "fork": None if node.place.fork is None else str(node.place.fork),
            "kept_tokens": node.place.kept_tokens,
            "new_tokens": len(node.tokens) - node.num_sampled,
            "sampled_tokens": node.num_sampled,
            "segment": sequence.get(node.number),
            "first_message": start,
            "num_messages": len(node.messages),
        }
        for node, start, lanes in zip(nodes, starts, _lanes(nodes), strict=False)
    ]


def _begins(node: Node) -> str:
    fork, parent = node.place.fork, node.place.parent
    if fork is None:
        return f"goes on from {parent}"
    if parent is None or fork == Fork.NEW:
        return str(fork)
    return f"{fork}, from {parent}"


def _lanes(nodes: Sequence[Node]) -> list[str]:
    """A line per request of a drawing of the branches: \u25cf where it stands, \u2502 for each that later ones go on
    from. A branch that has ended leaves its place to the next."""
    last = {node.number: node.number for node in nodes}
    last |= {
        node.place.parent: node.number for node in nodes if node.place.fork is None and node.place.parent is not None
    }
    tips: list[int] = []
    lines = []
    for number, place in ((node.number, node.place) for node in nodes):
        free = [lane for lane, tip in enumerate(tips) if last[tip] < number]
        if place.fork is None and place.parent in tips:
            lane = tips.index(place.parent)
        else:
            lane = free[0] if free else len(tips)
        tips[lane : lane + 1] = [number]
        marks = ("\u25cf" if tip == number else "\u2502" if last[tip] > number else " " for tip in tips)
        lines.append(" ".join(marks).rstrip())
    return lines
