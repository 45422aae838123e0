"""The training sequences that follow from a session's tree, and what it takes to find them."""

import random

from context.authors import USER, default_authors
from context.tokens.session_nodes import Node, Place, Status
from context.tokens.session_segments import segments_of, sequences_of
from context.tokens.token_sequence import TokenSequence

AUTHORS = default_authors()


def node(number: int, parent: int | None, kept: int, count: int, status: Status = Status.TRAINED) -> Node:
    """A request of `count` tokens behind the kept ones, the last of which is its reply."""
    tokens = TokenSequence.constant(range(100 * number, 100 * number + count), AUTHORS.code(USER))
    return Node(number, Place(parent, kept, 0, "", None), tokens, min(count, 1), (), status)


def random_tree(seed: int) -> list[Node]:
    rng, nodes = random.Random(seed), list[Node]()
    for number in range(rng.randint(1, 12)):
        parent = rng.randrange(number) if number and rng.random() < 0.9 else None
        whole = 0 if parent is None else nodes[parent].num_path_tokens
        kept = whole if rng.random() < 0.6 else rng.randint(0, whole)
        nodes.append(node(number, parent, kept, rng.randint(0, 3), rng.choice([*Status, Status.TRAINED])))
    return nodes


def test_training_sequences_are_the_longest_of_the_paths_that_end_with_a_trained_reply() -> None:
    for seed in range(500):
        nodes, whole = random_tree(seed), list[list[tuple[int, int]]]()
        for each in nodes:  # every token with its place in its node
            before = [] if each.place.parent is None else whole[each.place.parent][: each.place.kept_tokens]
            whole.append([*before, *((each.number, place) for place in range(len(each.tokens)))])
        paths = {each.number: whole[each.number] for each in nodes if each.is_trained}
        ends = {number: (number, len(nodes[number].tokens) - 1) for number in paths}
        longest = {n: p for n, p in paths.items() if not any(ends[n] in q for m, q in paths.items() if m != n)}
        found = {n: [(at, i) for at, count in path for i in range(count)] for n, path in sequences_of(nodes).items()}
        assert found == longest


class Counted(list[Node]):
    """Nodes that count how often one of them is looked at by its number."""

    looks = 0

    def __getitem__(self, at: int) -> Node:  # type: ignore[override]  # nobody takes slices of them
        self.looks += 1
        return super().__getitem__(at)


def chain(count: int) -> list[Node]:
    """Requests that each go on from the reply to the one before."""
    return [node(number, number - 1 if number else None, 3 * number, 3) for number in range(count)]


def test_looks_at_a_session_grow_with_its_length_alone() -> None:
    short, long = Counted(chain(1000)), Counted(chain(4000))
    segments_of(short, AUTHORS)
    assert len(segments_of(long, AUTHORS)) == 1
    assert 0 < long.looks <= 4.01 * short.looks
