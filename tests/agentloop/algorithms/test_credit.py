import math

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


def test_turn_rewards_divide_by_a_deviation_over_trajectories() -> None:
    # (0.25^2 + (2 x 0.75^2 + 2 x 0.25^2) / 4) / (2 - 1) = 0.0625 + 0.3125 = 0.375
    scale = math.sqrt(0.375) + 1e-6
    assert relative(SHORT, SHORT, LONG, normalise_std=True) == pytest.approx([0.25 / scale], rel=1e-12)


def test_turn_rewards_that_tell_nothing_are_exactly_zero() -> None:
    same = [Member(0.0, turn_rewards=(0.3,) * count) for count in (1, 2, 7)]
    for member in same:
        assert relative(member, *same, normalise_std=True) == [0.0] * len(member.turn_rewards or ())
    assert relative(LONG, LONG, normalise_std=True) == [0.0] * 4
    assert relative(LONG) == [0.0] * 4
    assert relative(LONG, Member(1.0), LONG) == [0.0] * 4
    assert relative(Member(1.0), LONG, SHORT) == []


def test_replayed_turns_are_centred_by_others_and_divided_by_the_deviation_of_all() -> None:
    # Mean of SHORT alone: 1. Of both: mean 0.75, std sqrt(0.375).
    scale = math.sqrt(0.375) + 1e-6
    expected = [-1 / scale, -1 / scale, 0.0, 0.0]
    assert relative(LONG, SHORT, normalise_std=True) == pytest.approx(expected, rel=1e-12)


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


def mask(text: str) -> np.ndarray:
    return np.array([letter == "l" for letter in text])


def test_turns_land_on_their_replies_over_all_segments() -> None:
    masks = [mask("ullelle"), mask("uel")]
    placed = over_tokens(masks, [True, True], [1.0, 2.0, 3.0], outcome=9.0)
    assert placed is not None
    first, second = placed
    assert first.tolist() == [0, 1, 1, 0, 2, 2, 0]
    assert second.tolist() == [0, 0, 3]
    assert first.dtype == np.float32


def test_what_is_spoken_before_the_first_turn_counts_with_it_and_questions_with_the_whole() -> None:
    masks = [mask("ulel"), mask("ull"), mask("uelel")]
    placed = over_tokens(masks, [True, False, True], [1.0, 2.0, 3.0], outcome=9.0)
    assert placed is not None
    opening, question, rest = placed
    assert opening.tolist() == [0, 1, 0, 1]  # four runs for three turns: the first was in the opening
    assert question.tolist() == [0, 9, 9]
    assert rest.tolist() == [0, 0, 2, 0, 3]


@pytest.mark.parametrize("turns", [[], [1.0, 2.0]])
def test_turns_that_do_not_fit_the_replies_are_nobodys(turns: list[float]) -> None:
    assert over_tokens([mask("ull")], [True], turns, outcome=0.0) is None
