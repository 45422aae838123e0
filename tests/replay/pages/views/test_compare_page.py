"""Trajectories side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from context.messages import Message
from context.tokens.token_sequence import Segment
from tests.fakes.records import LLM, MESSAGES, group, new_store, sql, task, tokens, trajectory
from tests.replay.pages.serving import Served, inspecting


def said(*ids: int) -> Segment:
    return Segment(tokens(list(ids), [LLM] * len(ids)))


@pytest.fixture(scope="module")
def inspector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Three rows that begin alike: `b` parts from `a` at token 2, `c` has a second segment; one is damaged."""
    path = tmp_path_factory.mktemp("compared") / "replay.sqlite"
    with closing(new_store(path)) as store:
        rows = [
            trajectory("a", segments=(said(1, 2, 3, 4),), num_turns=1),
            trajectory("b", segments=(said(1, 2, 9, 4),), num_turns=1, member=1, slot=1, reward=0.25),
            trajectory("c", segments=(said(1, 2, 3, 4), said(5)), num_turns=1, member=2, slot=2),
            trajectory("damaged", member=3, slot=3),
        ]
        other = (*MESSAGES[:-1], Message("assistant", "on the table", author="llm"))
        store.append([task()], [group(size=4)], [rows[0], replace(rows[1], messages=other), *rows[2:]])
        sql(store, "update segments set tokens = ? where trajectory = 'damaged'", bytes(40))
    with inspecting(path) as server:
        yield server


def test_what_differs_between_trajectories_is_marked_on_every_side(inspector: Served) -> None:
    shown = inspector.page("/compare?id=a&id=b&id=c")
    assert "part at token 2 of segment 0" in shown
    found = re.findall(r'first-difference" id="first-difference-(\w)" title="(token 2, id \d)', shown)
    assert found == [("A", "token 2, id 3"), ("B", "token 2, id 9"), ("C", "token 2, id 3")]
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", shown, re.S)]
    assert ["reward", "1", "0.25", "1"] in rows
    assert not [row for row in rows if row[:1] == ["num turns"]]
    assert "in the drawer" in shown and "on the table" in shown
    assert "A ends here." in inspector.words("/compare?id=a&id=c&segment=1")
    same = inspector.page("/compare?id=a&id=a")
    assert "are the same." in same and "first-difference" not in same


@pytest.mark.parametrize(
    ("query", "status", "problem"),
    [
        ("id=a", 400, "id must be given 2 to 8 times, got 1"),
        ("&".join(["id=a"] * 9), 400, "id must be given 2 to 8 times, got 9"),
        ("id=a&id=nobody", 404, "begins none"),
        ("id=a&id=damaged", 404, "must read back as it was written"),
        ("id=a&id=b&segment=1", 404, "segment must be"),
    ],
)
def test_what_can_not_be_compared_is_one_line(inspector: Served, query: str, status: int, problem: str) -> None:
    found, text = inspector.problem(f"/compare?{query}")
    assert (found, problem in text) == (status, True), text[-600:]
