"""What the tree of an agent's session looks like to people: its requests, its branches, and whose each token is."""

from dataclasses import replace

import numpy as np
import pytest

from context.tokens.loss_mask import loss_mask
from context.tokens.session_nodes import Fork, Node, Place, Status
from replay import ReplayStore, questions
from replay.questions.tokens import turns_of
from replay.questions.trajectory import requests_of
from tests.fakes.random_agents import planned_session
from tests.fakes.records import AUTHORS, planned_row, put, session_row, tokens


def begun(*parents: int | None) -> list[Node]:
    """Requests that go on from these; None: from none."""
    made = []
    for number, parent in enumerate(parents):
        place = Place(parent, 0, 0, "", Fork.NEW if parent is None else None)
        made.append(Node(number, place, tokens([5], ["llm"]), 1, (), Status.TRAINED))
    return made


@pytest.mark.parametrize(
    ("parents", "lanes"),
    [
        ((None, None, 0, 1), ["●", "│ ●", "● │", "  ●"]),
        ((None, 0, 0), ["●", "●", "●"]),  # both go on from the first, which ends with the second of them
        ((None, 0, 0, 1), ["●", "●", "│ ●", "●"]),
        ((None, None, None, 0, 1, 2), ["●", "│ ●", "│ │ ●", "● │ │", "  ● │", "    ●"]),
    ],
)
def test_branches_that_go_on_stand_beside_each_other(parents: tuple[int | None, ...], lanes: list[str]) -> None:
    assert [one["lanes"] for one in requests_of(begun(*parents))] == lanes


@pytest.mark.parametrize("seed", range(20))
def test_tokens_have_the_request_that_was_answered_with_them_wherever_the_reply_is_shown(seed: int) -> None:
    row = session_row("a", seed=seed)
    shown = dict.fromkeys((node.number for node in row.nodes if node.is_trained), 0)
    for segment, turns in zip(row.segments, turns_of(row, AUTHORS), strict=True):
        assert (turns[loss_mask(segment.tokens, AUTHORS)] >= 0).all()
        for number in np.unique(turns[turns >= 0]).tolist():
            node = row.nodes[number]
            said = node.tokens.token_ids[len(node.tokens) - node.num_sampled :]
            assert segment.tokens.token_ids[turns == number].tolist() == said.tolist()
            if number in shown:
                shown[number] += int(loss_mask(segment.tokens, AUTHORS)[turns == number].any())
    assert set(shown.values()) <= {1}


def test_what_a_summary_replaced_is_shown_where_it_parts_with_its_requests(file_store: ReplayStore) -> None:
    put(file_store, planned_row("row-1"))
    found = questions.overview(file_store, "row-1")
    assert [part["requests"] for part in found["segments"]] == [[2], [0, 1, 3], [4]]
    assert [part["turns"] for part in found["segments"]] == [None] * 3
    nodes = planned_session()
    parted = [part["parted"] and part["parted"]["index"] for part in found["segments"]]
    assert parted == [None, nodes[2].place.kept_tokens, nodes[4].place.kept_tokens]
    assert found["requests"] == requests_of(nodes)
    assert questions.tokens(file_store, "row-1", 1)["turns"].count(3) == nodes[3].num_sampled
    # A row of no session has none.
    put(file_store, replace(planned_row("row-2"), nodes=()))
    assert questions.overview(file_store, "row-2")["requests"] == []
