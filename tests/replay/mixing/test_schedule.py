from __future__ import annotations

from typing import Any

import pytest

from replay.mixing.schedule import Schedule, progress_at


def course(first: float, iterations: int, **schedule: Any) -> list[float]:
    return [Schedule(**schedule).at(first, i, iterations) for i in range(1, iterations + 1)]


def test_constant_never_changes() -> None:
    assert course(0.3, 4) == [0.3] * 4


def test_linear_reaches_both_ends_exactly() -> None:
    assert course(0.4, 5, shape="linear", final=0.0) == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0])
    assert course(0.1, 5, shape="linear", final=0.7)[::4] == [0.1, 0.7]


def test_linear_over_iterations_runs_between_begin_and_end_only() -> None:
    found = course(0.0, 7, shape="linear", final=0.6, over="iterations", begin=2, end=5)
    assert found == pytest.approx([0.0, 0.0, 0.2, 0.4, 0.6, 0.6, 0.6])


def test_cosine_is_half_way_in_the_middle_and_flat_at_the_ends() -> None:
    first, near, middle, late, last = course(0.8, 5, shape="cosine", final=0.0)
    assert (first, middle, last) == pytest.approx((0.8, 0.4, 0.0))
    assert near == pytest.approx(0.8 * (1 + 2**-0.5) / 2)  # (1 + cos 45 degrees) / 2
    assert late == pytest.approx(0.8 * (1 - 2**-0.5) / 2)


def test_step_holds_each_value_until_the_next_place() -> None:
    assert course(0.5, 5, shape="step", steps=((0.5, 0.25), (0.9, 0.0))) == [0.5, 0.5, 0.25, 0.25, 0.0]
    assert course(0.0, 4, shape="step", over="iterations", steps=((3, 0.9),)) == [0.0, 0.0, 0.9, 0.9]


@pytest.mark.parametrize(
    ("schedule", "highest"),
    [
        (Schedule(), 0.2),
        (Schedule(shape="cosine", final=0.9), 0.9),
        (Schedule(shape="linear", final=0.1), 0.2),
        (Schedule(shape="step", steps=((0.1, 0.4), (0.2, 0.1))), 0.4),
    ],
)
def test_highest_is_the_largest_value_of_the_course(schedule: Schedule, highest: float) -> None:
    assert schedule.highest(0.2) == highest


def test_progress_of_a_run_of_one_iteration_is_its_beginning() -> None:
    assert progress_at(1, 1) == 0.0
