import math

import pytest
import torch

from agentloop.algorithms.advantages import grpo_advantages, returns


def test_advantages_divide_by_the_sample_standard_deviation() -> None:
    # mean 0.5, sample std sqrt(4 x 0.25 / 3) = 0.5773503
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert grpo_advantages([1, 0, 0, 1], normalise_std=True) == pytest.approx(
        [expected, -expected, -expected, expected], abs=1e-12
    )


def test_advantages_of_dr_grpo_are_only_centred() -> None:
    assert grpo_advantages([1.0, 0.0, 0.0, 0.0], normalise_std=False) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("rewards", [[1.0], [0.3] * 7, [0.0, 0.0], [1e9] * 5, []])
@pytest.mark.parametrize("normalise_std", [True, False])
def test_advantages_of_one_member_or_equal_rewards_are_exactly_zero(rewards: list[float], normalise_std: bool) -> None:
    assert grpo_advantages(rewards, normalise_std=normalise_std) == [0.0] * len(rewards)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_advantages_refuse_rewards_that_are_not_finite(bad: float) -> None:
    with pytest.raises(ValueError, match=r"rewards\[1\] must be finite"):
        grpo_advantages([1.0, bad], normalise_std=True)


def test_returns_are_advantages_plus_values() -> None:
    torch.testing.assert_close(
        returns(torch.tensor([0.5, -1.0]), torch.tensor([2.0, 0.25])), torch.tensor([2.5, -0.75])
    )
