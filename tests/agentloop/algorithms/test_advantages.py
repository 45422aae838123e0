"""Every algorithm's advantages against its formula, written out here in plain float64 loops."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from agentloop.algorithms.advantages import (
    RULES,
    Member,
    advantages,
    group_advantages,
    normalised,
    whitened,
)

ALGORITHMS = tuple(RULES)
COMPARING = ("grpo", "dr_grpo", "rloo", "opo", "reinforce++_baseline")


def of_group(algorithm: str, rewards: Sequence[float], lengths: Sequence[int] | None = None) -> list[float]:
    members = [Member(r, n) for r, n in zip(rewards, lengths or [1] * len(rewards), strict=True)]
    return advantages(members, [range(len(members))] * len(members), RULES[algorithm])


def grpo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    return [
        (r - float(np.mean(np.float64(rewards)))) / (float(np.std(np.float64(rewards), ddof=1)) + 1e-6) for r in rewards
    ]


def rloo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    result = []
    for i, own in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i]
        result.append(own - sum(others) / len(others))
    return result


def opo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    baseline = sum(length * r for length, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [r - baseline for r in rewards]


FORMULAS: dict[str, Callable[[Sequence[float], Sequence[int]], list[float]]] = {
    "grpo": grpo,
    "dr_grpo": lambda rewards, _: [r - sum(rewards) / len(rewards) for r in rewards],
    "rloo": rloo,
    "opo": opo,
    "reinforce++": grpo,
    "reinforce++_baseline": lambda rewards, _: [r - sum(rewards) / len(rewards) for r in rewards],
    "reinforce": lambda rewards, _: list(rewards),
}


@pytest.mark.parametrize("algorithm", FORMULAS)
def test_advantages_follow_the_formula_of_their_algorithm(algorithm: str) -> None:
    rng = np.random.default_rng(3)
    for size in [2, 3, 5, 8, 33] * 4:
        rewards = (rng.normal(size=size) * 10.0 ** rng.integers(-3, 4)).tolist()
        lengths = rng.integers(1, 500, size).tolist()
        expected = FORMULAS[algorithm](rewards, lengths)
        assert of_group(algorithm, rewards, lengths) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("rewards", [[1.0], [0.3] * 7, [1.0, 0.0, 0.0], [0.1, -4.0, 2.5, 2.5]])
def test_an_imported_group_has_the_advantages_of_a_collected_one(rewards: list[float]) -> None:
    assert group_advantages(rewards, True) == of_group("grpo", rewards)
    assert group_advantages(rewards, False) == of_group("dr_grpo", rewards)


def test_remax_compares_with_the_greedy_reward_and_knows_when_there_is_none() -> None:
    members = [Member(1.0, greedy_reward=0.25), Member(0.25, greedy_reward=0.25), Member(1.0)]
    assert advantages(members, [()] * 3, RULES["remax"]) == [0.75, 0.0, 0.0]


@pytest.mark.parametrize("rewards", [[1.0], [0.3] * 7, [0.0, 0.0], [1e9] * 5, []])
@pytest.mark.parametrize("algorithm", [*COMPARING, "reinforce++"])
def test_advantages_of_one_member_or_equal_rewards_are_exactly_zero(rewards: list[float], algorithm: str) -> None:
    assert of_group(algorithm, rewards, list(range(3, 3 + len(rewards)))) == [0.0] * len(rewards)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_advantages_refuse_rewards_that_are_not_finite(algorithm: str, bad: float) -> None:
    with pytest.raises(ValueError, match=r"rewards\[1\] must be finite"):
        of_group(algorithm, [1.0, bad])


# Deviations are sqrt(variance + 1e-8), variance with n - 1.
ROOT_THIRD, ROOT_HALF = math.sqrt(1 / 3 + 1e-8), math.sqrt(1 / 2 + 1e-8)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # Telling: 1, -1, 3: mean 1, variance (0 + 4 + 4) / 2 = 4.
        ([1.0, 0.0, -1.0, 3.0, 0.0], [0, 0, -2 / math.sqrt(4 + 1e-8), 2 / math.sqrt(4 + 1e-8), 0]),
        ([1.0, 1.0, 0.0], [0, 0, 0]),
        ([1.0, 0.0, 0.0], [0, 0, 0]),
        ([0.0, 0.7], [0, 0]),
        ([0.7], [0]),
        ([0.3] * 7, [0] * 7),
        ([0.0, 0.0], [0, 0]),
        ([], []),
        # Mean 1 - 1e-6 / 3, variance 1e-12 / 3, which is rounding: 0.333e-6 / 1e-4.
        ([1.0, 1.0, 0.999999], [1 / 300, 1 / 300, -2 / 300]),
    ],
)
def test_whitening_where_groups_are_compared_leaves_zeros_out(values: list[float], expected: list[float]) -> None:
    assert normalised(values, centre=True, zero_is_measured=False) == pytest.approx(expected, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # Mean 2/3, variance (1/9 + 1/9 + 4/9) / 2 = 1/3.
        ([1.0, 1.0, 0.0], [1 / 3 / ROOT_THIRD, 1 / 3 / ROOT_THIRD, -2 / 3 / ROOT_THIRD]),
        ([1.0, 0.0, 0.0], [2 / 3 / ROOT_THIRD, -1 / 3 / ROOT_THIRD, -1 / 3 / ROOT_THIRD]),
        ([1.0, 0.0], [0.5 / ROOT_HALF, -0.5 / ROOT_HALF]),
        ([1.0, 1.0, 1.0], [0, 0, 0]),
        ([0.0, 0.0, 0.0], [0, 0, 0]),
        ([1.0], [0]),
        ([0.0], [0]),
        ([1.0, 1.0, 0.999999], [1 / 300, 1 / 300, -2 / 300]),
    ],
)
def test_whitening_of_rewards_takes_a_zero_for_a_measurement(values: list[float], expected: list[float]) -> None:
    found = normalised(values, centre=True, zero_is_measured=True)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-12)


def test_scaling_divides_alone_and_leaves_equal_values_as_they_are() -> None:
    scale = math.sqrt(4 + 1e-8)
    scaled = normalised([1.0, 0.0, -1.0, 3.0], centre=False, zero_is_measured=False)
    assert scaled == pytest.approx([1 / scale, 0, -1 / scale, 3 / scale], abs=1e-12)
    assert normalised([1.0, 0.0], centre=False, zero_is_measured=True) == pytest.approx([1 / ROOT_HALF, 0.0])
    for equal in ([0.3] * 3, [0.0, 0.7], [0.0, 0.0]):
        assert normalised(equal, centre=False, zero_is_measured=False) == equal
    assert normalised([1.0, 1.0], centre=False, zero_is_measured=True) == [1.0, 1.0]


def test_advantages_over_groups_are_whitened_by_all_of_them_together() -> None:
    # Groups [1, 0, 0, 0] and [1, 1]: 0.75, -0.25 x 3 and 0, 0. Mean 0, variance (0.5625 + 3 x 0.0625) / 5 = 0.15.
    values = [0.75, -0.25, -0.25, -0.25, 0.0, 0.0]
    scale = math.sqrt(0.15 + 1e-8)
    expected = [0.75 / scale, *[-0.25 / scale] * 3, 0.0, 0.0]
    assert whitened(values, [range(6)] * 6) == pytest.approx(expected, abs=1e-12)
    assert whitened(values, [range(6)] * 6)[4:] == [0.0, 0.0]
    assert whitened([0.0] * 4, [range(4)] * 4) == [0.0] * 4
