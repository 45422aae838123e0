from __future__ import annotations

from typing import Any

import pytest

from replay.mixing.schedule import Schedule

PLACES = {"over": "iterations", "begin": 2, "end": 5}
COURSES: list[tuple[float, dict[str, Any], list[float]]] = [
    (0.3, {}, [0.3] * 4),
    (0.3, {"shape": "linear", "final": 0.9}, [0.3]),  # of one iteration: its beginning
    (0.4, {"shape": "linear", "final": 0.0}, [0.4, 0.3, 0.2, 0.1, 0.0]),
    (0.0, {"shape": "linear", "final": 0.6, **PLACES}, [0.0, 0.0, 0.2, 0.4, 0.6, 0.6, 0.6]),
    # Half of 1 + cos 45 degrees after a quarter of the way.
    (0.8, {"shape": "cosine", "final": 0.0}, [0.8, 0.4 * (1 + 2**-0.5), 0.4, 0.4 * (1 - 2**-0.5), 0.0]),
    (0.5, {"shape": "step", "steps": ((0.5, 0.25), (0.9, 0.0))}, [0.5, 0.5, 0.25, 0.25, 0.0]),
    (0.0, {"shape": "step", "over": "iterations", "steps": ((3, 0.9),)}, [0.0, 0.0, 0.9, 0.9]),
]


@pytest.mark.parametrize(("first", "schedule", "course"), COURSES)
def test_fraction_runs_along_its_schedule_and_ends_exactly(
    first: float, schedule: dict[str, Any], course: list[float]
) -> None:
    found = [Schedule(**schedule).at(first, i, len(course)) for i in range(1, len(course) + 1)]
    assert found == pytest.approx(course)
    assert (found[0], found[-1]) == (course[0], course[-1])


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
