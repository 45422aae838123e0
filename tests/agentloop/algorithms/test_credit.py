import math
from typing import Any

import numpy as np
import pytest

from agentloop.algorithms.credit import over_tokens, relative_turn_rewards, turn_advantages
from agentloop.algorithms.declarations import Member

SHORT = Member(0.0, turn_rewards=(1.0,))
LONG = Member(0.0, turn_rewards=(0.0, 0.0, 1.0, 1.0))


def relative(member: Member, *compared: Member, normalise_std: bool = False, centre: bool = True) -> list[float]:
    return list(relative_turn_rewards(member, compared, centre=centre, normalise_std=normalise_std))


def test_turn_rewards_are_centred_with_a_trajectory_weighing_the_same_whatever_its_turns() -> None:
    # mean of the means: (1 + 2/4) / 2 = 0.75, where the mean over all five turns would be 0.6
    assert relative(SHORT, SHORT, LONG) == [0.25]
    assert relative(LONG, SHORT, LONG) == [-0.75, -0.75, 0.25, 0.25]


def test_turn_rewards_are_divided_by_the_deviation_of_all_trajectories_whoever_centres_them() -> None:
    # (0.25^2 + (2 x 0.75^2 + 2 x 0.25^2) / 4) / (2 - 1) = 0.0625 + 0.3125 = 0.375
    scale = math.sqrt(0.375) + 1e-6
    assert relative(SHORT, SHORT, LONG, normalise_std=True) == pytest.approx([0.25 / scale], rel=1e-12)
    # Replayed turns are centred by others: the mean of SHORT alone is 1.
    expected = [-1 / scale, -1 / scale, 0.0, 0.0]
    assert relative(LONG, SHORT, normalise_std=True) == pytest.approx(expected, rel=1e-12)


def test_turn_rewards_that_tell_nothing_are_exactly_zero() -> None:
    same = [Member(0.0, turn_rewards=(0.3,) * count) for count in (1, 2, 7)]
    for member in same:
        assert relative(member, *same, normalise_std=True) == [0.0] * len(member.turn_rewards or ())
    assert relative(LONG, LONG, normalise_std=True) == [0.0] * 4
    assert relative(LONG) == [0.0] * 4
    assert relative(LONG, Member(1.0), LONG) == [0.0] * 4
    assert relative(Member(1.0), LONG, SHORT) == []


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.97, 1.0])
def test_turn_advantages_are_the_double_sum(gamma: float) -> None:
    rng = np.random.default_rng(1)
    for turns in (1, 2, 5, 9):
        terms, outcome = rng.normal(size=turns).tolist(), float(rng.normal())
        expected = [
            gamma ** (turns - 1 - k) * outcome + 0.7 * sum(gamma ** (j - k) * terms[j] for j in range(k, turns))
            for k in range(turns)
        ]
        assert turn_advantages(outcome, terms, gamma=gamma, coef=0.7) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("segments", "turns", "expected"),
    [
        ("ullelle uel", 3, [[0, 1, 1, 0, 2, 2, 0], [0, 0, 3]]),
        # Four runs for three turns: the first was in the opening. A question aside (?) has the outcome.
        ("ulel ?ull uelel", 3, [[0, 1, 0, 1], [0, 9, 9], [0, 0, 2, 0, 3]]),
        ("ull", 0, None),  # turns that do not fit the replies
        ("ull", 2, None),
    ],
)
def test_turns_land_on_their_replies_over_all_segments(segments: str, turns: int, expected: Any) -> None:
    parts = segments.split()
    masks = [np.array([letter == "l" for letter in part.removeprefix("?")]) for part in parts]
    rewards = [float(turn) for turn in range(1, turns + 1)]
    placed = over_tokens(masks, [part[0] != "?" for part in parts], rewards, outcome=9.0)
    assert placed is None or {part.dtype for part in placed} == {np.dtype(np.float32)}
    assert (placed and [part.tolist() for part in placed]) == expected
