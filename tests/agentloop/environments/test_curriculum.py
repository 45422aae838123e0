"""In which order tasks come, and that nothing but seed and success rates decides it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from agentloop.config.sections.environments import TasksSection
from agentloop.environments.task_source import TaskOrder


def order(size: int = 4, *, seed: int = 7, **rule: Any) -> TaskOrder:
    return TaskOrder(size, seed=seed, section=TasksSection.model_construct(**rule))


def gone_through(tasks: TaskOrder, first: int, last: int, rates: dict[int, float]) -> list[int]:
    """Numbers of the tasks at these indices, each observed with 8 attempts before the next is asked for."""
    found = []
    for index in range(first, last):
        number = tasks.at(index)
        tasks.record_success(index, attempts=8, successes=8 * rates[number])
        found.append(number)
    return found


def test_rows_as_they_stand_come_in_that_order_in_every_epoch() -> None:
    tasks = order(3, shuffle=False)
    assert [tasks.at(index) for index in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_learnability_draws_with_the_weights_of_its_formula() -> None:
    """p = 1/2, 1/10, 9/10 and 1/2 (never tried): 4 p (1 - p) = 1, 0.36, 0.36, 1 of 2.72."""
    tasks = order(curriculum="learnability", curriculum_decay=0.0)
    for number, successes in ((0, 4), (1, 0), (2, 8)):
        tasks._given[0] = number
        tasks._next = 1
        tasks.record_success(0, attempts=8, successes=successes)
    draws = 20_000
    found = Counter[int]()
    for index in range(1, draws + 1):
        found[tasks.at(index)] += 1
        tasks._given.clear()  # nothing is under way: each draw is of all four
    expected = [draws * weight / 2.72 for weight in (1.0, 0.36, 0.36, 1.0)]
    chi_square = sum((found[number] - mean) ** 2 / mean for number, mean in enumerate(expected))
    assert chi_square < 16.27  # three degrees of freedom, 0.1 %


def test_learnability_never_weighs_a_task_below_the_floor() -> None:
    """p -> 1/102 after 100 failures: 4 p (1 - p) = 0.0388, below the floor of a half."""
    tasks = order(2, curriculum="learnability", curriculum_floor=0.5)
    number = tasks.at(0)
    assert tasks.success(number) == 0.5
    tasks.record_success(0, attempts=100, successes=0)
    assert tasks._weights[number] == 500_000
    assert tasks._weights[1 - number] == 1_000_000
    tasks._given[0] = number  # the same index again
    tasks.record_success(0, attempts=8, successes=6)
    assert tasks.success(number) == (0 / 2 + 6 + 1) / (100 / 2 + 8 + 2)


def test_learnability_gives_no_task_that_is_under_way_and_draws_the_same_on_every_machine() -> None:
    tasks = order(8, curriculum="learnability")
    assert sorted(tasks.at(index) for index in range(8)) == list(range(8))
    assert tasks.at(8) in range(8)  # all of them are: then one comes twice
    # Written out once: whole-number weights, and a generator that Python promises to keep.
    tasks = order(10, curriculum="learnability")
    assert gone_through(tasks, 0, 12, dict.fromkeys(range(10), 0.0)) == [4, 8, 7, 2, 8, 4, 3, 6, 1, 6, 2, 1]


def test_curriculum_goes_on_from_its_state_as_if_it_had_never_stopped() -> None:
    rates = {number: number / 8 for number in range(8)}
    unbroken, resumed, other = (order(8, seed=seed, curriculum="learnability") for seed in (7, 7, 8))
    assert gone_through(unbroken, 0, 13, rates) != gone_through(other, 0, 13, rates)
    unbroken.at(15)  # three more are under way
    resumed.load_state(json.loads(json.dumps(unbroken.state())))
    assert gone_through(resumed, 13, 40, rates) == gone_through(unbroken, 13, 40, rates)
