"""The calculator agent's problems have the answers of their sums, and none that it is judged by is learned."""

import random

import pytest

from agentloop import Message, ToolCall
from examples.calculator_agent.agent import CalculatorAgent
from examples.calculator_agent.make_data import problems, row
from examples.calculator_agent.problems import HELD_OUT, TRAINED, Problem

APPLES = Problem("boxes_and_more", "Ivy has 3 boxes with 12 apples each, and 5 more apples.", "3 * 12 + 5", 41)


def reward(problem: Problem, answer: str, *, asks: bool = True) -> float:
    agent = CalculatorAgent()
    task = agent.task_from_row(row(problem))
    call = Message("assistant", "", tool_calls=(ToolCall("calculate", {"expression": problem.sum}),))
    return agent.reward(task, [*task.messages(), *[call] * asks, Message("assistant", answer)])


def test_calculator_calculates_sums_and_refuses_all_else() -> None:
    sums = {"12 + 7 * 3": "33", "(12 + 7) * 3": "57", "-4 / 8": "-0.5", "0.1 + 0.2": "0.3", "12 * 34.5": "414"}
    assert {sum: CalculatorAgent().calculate(sum) for sum in sums} == sums
    for other in ("9 ** 9 ** 9", "__import__('os')", "1 +", "", "1 < 2", "'a' * 3", "(1, 2)"):
        with pytest.raises((ValueError, SyntaxError)):
            CalculatorAgent().calculate(other)


def test_the_right_number_after_a_calculation_is_rewarded_alone() -> None:
    assert reward(APPLES, "41") == reward(APPLES, "3 boxes and 5 are 41.") == 1.0
    assert reward(APPLES, "41", asks=False) == 0.0
    assert [reward(APPLES, answer) for answer in ("42", "", "forty-one", "41 or 42")] == [0.0] * 4
    assert reward(Problem("sum", "", "900 + 600", 1500), "1,500") == 1.0


def test_every_problem_has_the_whole_number_that_its_sum_gives_and_names_its_numbers() -> None:
    for problem in problems((*TRAINED, *HELD_OUT), 800, random.Random(1)):
        assert CalculatorAgent().calculate(problem.sum) == str(problem.answer)
        numbers = [word for word in problem.sum.replace("(", " ").replace(")", " ").split() if word.isdigit()]
        said = problem.english.replace(",", " ").replace(".", " ").replace("?", " ").split()
        assert set(numbers) - {"100"} <= set(said)
        assert "{" not in problem.english


def test_no_situation_is_both_learned_and_judged_by() -> None:
    learned, judged = ({kind.name for kind in kinds} for kinds in (TRAINED, HELD_OUT))
    assert (len(learned), len(judged), len(learned | judged)) == (12, 4, 16)
    shown, asked = ({words for kind in kinds for words in kind.english} for kinds in (TRAINED, HELD_OUT))
    assert not shown & asked
    assert {kind.sum for kind in HELD_OUT} <= {kind.sum for kind in TRAINED}
