"""Every algorithm's advantages against its formula, written out here in plain float64 loops."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from agentloop.algorithms.advantages import RULES, Member, advantages, group_advantages, normalised, whitened

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
ROOT_THIRD = math.sqrt(1 / 3 + 1e-8)


def test_advantages_over_groups_are_whitened_by_all_of_them_together() -> None:
    # Groups [1, 0, 0, 0] and [1, 1]: 0.75, -0.25 x 3 and 0, 0. Mean 0, variance (0.5625 + 3 x 0.0625) / 5 = 0.15.
    values = [0.75, -0.25, -0.25, -0.25, 0.0, 0.0]
    scale = math.sqrt(0.15 + 1e-8)
    expected = [0.75 / scale, *[-0.25 / scale] * 3, 0.0, 0.0]
    assert whitened(values, [range(6)] * 6) == pytest.approx(expected, abs=1e-12)
    assert whitened(values, [range(6)] * 6)[4:] == [0.0, 0.0]
    assert whitened([0.0] * 4, [range(4)] * 4) == [0.0] * 4


@pytest.mark.parametrize(
    ("values", "centre", "zero_is_measured", "expected"),
    [
        # Where groups are compared zeros are no signal: of 1, -1, 3 the mean is 1, the variance (0 + 4 + 4) / 2 = 4.
        ([1.0, 0.0, -1.0, 3.0, 0.0], True, False, [0, 0, -2 / math.sqrt(4 + 1e-8), 2 / math.sqrt(4 + 1e-8), 0]),
        ([1.0, 0.0, 0.0], True, False, [0, 0, 0]),
        ([0.3] * 7, True, False, [0] * 7),
        ([], True, False, []),
        # Mean 1 - 1e-6 / 3, variance 1e-12 / 3, which is rounding: 0.333e-6 / 1e-4.
        ([1.0, 1.0, 0.999999], True, False, [1 / 300, 1 / 300, -2 / 300]),
        # A zero that is measured: mean 1/3, variance 1/3.
        ([1.0, 0.0, 0.0], True, True, [2 / 3 / ROOT_THIRD, -1 / 3 / ROOT_THIRD, -1 / 3 / ROOT_THIRD]),
        ([1.0, 1.0, 1.0], True, True, [0, 0, 0]),
        ([0.0], True, True, [0]),
        # Scaling divides alone, and leaves equal values as they are.
        ([1.0, 0.0, -1.0, 3.0], False, False, [1 / math.sqrt(4 + 1e-8), 0, -1 / math.sqrt(4 + 1e-8), 1.5]),
        ([1.0, 0.0], False, True, [1 / math.sqrt(1 / 2 + 1e-8), 0]),
        ([0.0, 0.7], False, False, [0.0, 0.7]),
    ],
)
def test_advantages_of_a_batch_are_whitened_or_scaled_as_written(
    values: list[float], centre: bool, zero_is_measured: bool, expected: list[float]
) -> None:
    found = normalised(values, centre=centre, zero_is_measured=zero_is_measured)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-12)
