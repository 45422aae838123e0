"""The coding agent's problems are solved by their code, judged by hidden tests, and held out by template."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from agentloop import Message, ToolCall
from examples.coding_agent.agent import DONE, CodingAgent
from examples.coding_agent.make_data import problems
from examples.coding_agent.problems import CHANGED, COMBINED, HELD_OUT, KEPT, TRAINED, Problem, Template

BY_HAND = [
    (Problem(Template("even", "squares", "sum"), 3), [1, 2, -4, 5], 20),
    (Problem(Template("multiples", "opposites", "sorted"), 3), [9, 4, -6, 12], [-12, -9, 6]),
    (Problem(Template("above", "halves", "largest"), 5), [5, 6, 13, -9], 6),
    (Problem(Template("positive", "doubles", "smallest"), 4), [3, 9, 0, -4], 6),
]


@pytest.fixture
def posed() -> tuple[Problem, dict[str, Any]]:
    return next(problems([Template("even", "squares", "sum")], 1, random.Random(1)))


def reward(row: dict[str, Any], codes: Sequence[str], answer: str = DONE) -> float:
    agent = CodingAgent()
    task = agent.task_from_row(row)
    agent.start(task)
    replies = [Message("assistant", "", tool_calls=(ToolCall("try_code", {"code": code}),)) for code in codes]
    return agent.reward(task, [*task.messages(), *replies, Message("assistant", answer)])


def test_code_does_what_the_english_says() -> None:
    for problem, xs, result in BY_HAND:
        assert problem.outcome(xs).value == result


def test_hidden_tests_decide(posed: tuple[Problem, dict[str, Any]]) -> None:
    problem, row = posed
    assert reward(row, [problem.code]) == 1.0
    assert reward(row, ["oops", "def solve(xs): return sum(x ** 2 for x in xs if not x % 2)"]) == 1.0
    for test in (row["example"], *row["tests"]):
        assert reward(row, [f"def solve(xs): return {test['result']}"]) == 0.0  # right once is not right
    assert reward(row, [problem.code, "def solve(xs): return None"]) == 0.0
    assert reward(row, [problem.code], answer="Done") == 0.0
    assert reward(row, []) == 0.0


def test_hidden_tests_are_not_shown(posed: tuple[Problem, dict[str, Any]]) -> None:
    _, row = posed
    shown = "".join(message.content for message in CodingAgent().task_from_row(row).messages())
    assert str(row["example"]["xs"]) in shown
    assert not any(str(test["xs"]) in shown for test in row["tests"])


def test_no_template_is_both_learned_and_judged_by() -> None:
    assert not set(TRAINED) & set(HELD_OUT)
    for name, parts in (("kept", KEPT), ("changed", CHANGED), ("combined", COMBINED)):
        assert {getattr(template, name) for template in TRAINED} == set(parts)
        assert {getattr(template, name) for template in HELD_OUT} == set(parts)
