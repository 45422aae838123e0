from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.mixing import apportion, group_sizes, plan_batch


@pytest.mark.parametrize(
    ("total", "shares", "parts"),
    [
        (128, [0.75, 0.25], [96, 32]),
        (10, [1 / 3, 1 / 3, 1 / 3], [4, 3, 3]),
        (7, [0.5, 0.5], [4, 3]),
        (10, [0.7, 0.3], [7, 3]),
        (5, [2, 1], [3, 2]),  # quotas 3.33 and 1.67
        (0, [1.0], [0]),
        (3, [0.0, 1.0], [0, 3]),
    ],
)
def test_apportion_rounds_by_largest_remainder(total: int, shares: list[float], parts: list[int]) -> None:
    assert apportion(total, shares) == parts


@given(st.integers(0, 500), st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(any))
def test_apportion_sums_exactly_and_stays_within_one_of_each_quota(total: int, shares: list[float]) -> None:
    parts = apportion(total, shares)
    exact = [Fraction(share) for share in shares]
    assert sum(parts) == total
    assert all(abs(part - total * share / sum(exact)) < 1 for part, share in zip(parts, exact, strict=True))


@pytest.mark.parametrize("shares", [[], [0.0, 0.0], [-0.5, 1.5]])
def test_apportion_refuses_shares_that_are_none(shares: list[float]) -> None:
    with pytest.raises(ValueError, match="shares must be >= 0"):
        apportion(4, shares)


@pytest.mark.parametrize(
    ("trajectories", "fraction", "fresh", "replay"),
    [
        (128, 0.0, 128, 0),
        (128, 1 / 3, 85, 43),  # 42.67 is rounded up
        (128, 0.25, 96, 32),
        (128, 0.5, 64, 64),
        (128, 0.9, 13, 115),  # 115.2
        (128, 1.0, 0, 128),
        (10, 0.3, 7, 3),
        (3, 0.5, 2, 1),  # a tie goes to the fresh stream
    ],
)
def test_plan_splits_the_batch_exactly(trajectories: int, fraction: float, fresh: int, replay: int) -> None:
    plan = plan_batch(trajectories, fraction, available=1000, mode="train")
    assert (plan.planned_fresh, plan.planned_replay) == (fresh, replay)
    assert (plan.fresh, plan.replay, plan.shortfall) == (fresh, replay, 0)


def test_plan_fills_with_fresh_ones_what_the_buffer_lacks() -> None:
    plan = plan_batch(128, 0.25, available=10, mode="train")
    assert (plan.planned_fresh, plan.planned_replay) == (96, 32)
    assert (plan.fresh, plan.replay, plan.shortfall) == (118, 10, 22)


def test_plan_puts_observed_rows_on_top_of_a_full_fresh_batch() -> None:
    plan = plan_batch(128, 0.25, available=10, mode="observe")
    assert (plan.fresh, plan.replay, plan.shortfall) == (128, 10, 22)
    assert (plan.planned_fresh, plan.planned_replay) == (128, 32)


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_plan_refuses_a_fraction_that_is_none(fraction: float) -> None:
    with pytest.raises(ValueError, match="replay.fraction must be between 0 and 1"):
        plan_batch(8, fraction, available=0, mode="train")


@pytest.mark.parametrize(
    ("fresh", "size", "sizes"),
    [
        (96, 8, [8] * 12),
        (85, 8, [8] * 8 + [7] * 3),
        (9, 8, [5, 4]),
        (8, 8, [8]),
        (1, 8, [1]),
        (0, 8, []),
        (13, 1, [1] * 13),
    ],
)
def test_group_sizes_are_as_even_as_possible(fresh: int, size: int, sizes: list[int]) -> None:
    assert group_sizes(fresh, size) == sizes
