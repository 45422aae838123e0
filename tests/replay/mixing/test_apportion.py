from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.mixing.apportion import Remainders, apportion, group_sizes


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


shares_of_some = st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(any)


@given(st.integers(0, 500), shares_of_some)
def test_apportion_sums_exactly_and_stays_within_one_of_each_quota(total: int, shares: list[float]) -> None:
    parts = apportion(total, shares)
    exact = [Fraction(share) for share in shares]
    assert sum(parts) == total
    assert all(abs(part - total * share / sum(exact)) < 1 for part, share in zip(parts, exact, strict=True))


@pytest.mark.parametrize("shares", [[], [0.0, 0.0], [-0.5, 1.5]])
def test_apportion_refuses_shares_that_are_none(shares: list[float]) -> None:
    with pytest.raises(ValueError, match="shares must be >= 0"):
        apportion(4, shares)


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 1)), max_size=40))
def test_sums_of_two_carried_parts_stay_within_half_of_the_declared_ones(calls: list[tuple[int, float]]) -> None:
    remainders, declared, given_ = Remainders(), Fraction(0), 0
    for total, share in calls:
        first, second = remainders.split("replay", total, [1 - Fraction(share), Fraction(share)])
        assert min(first, second) >= 0
        assert first + second == total
        declared += total * Fraction(share)
        given_ += second
        assert abs(given_ - declared) <= Fraction(1, 2)


@given(shares_of_some, st.lists(st.integers(0, 30), max_size=40))
def test_sums_of_many_carried_parts_follow_the_shares(shares: list[float], totals: list[int]) -> None:
    remainders = Remainders()
    exact = [Fraction(share) / sum(map(Fraction, shares)) for share in shares]
    sums = [0] * len(shares)
    for total in totals:
        parts = remainders.split("sources", total, shares)
        assert sum(parts) == total
        assert min(parts) >= 0
        sums = [before + part for before, part in zip(sums, parts, strict=True)]
    assert all(abs(part - sum(totals) * share) < 2 for part, share in zip(sums, exact, strict=True))


def test_remainders_are_kept_apart_by_name_and_survive_json() -> None:
    ours = Remainders()
    assert ours.split("a", 1, [0.5, 0.5]) == [1, 0]
    assert ours.split("b", 1, [0.5, 0.5]) == [1, 0]
    again = Remainders()
    again.load_state(json.loads(json.dumps(ours.state())))
    assert again.split("a", 1, [0.5, 0.5]) == [0, 1]


@pytest.mark.parametrize(
    ("fresh", "size", "sizes"),
    [(96, 8, [8] * 12), (85, 8, [8] * 8 + [7] * 3), (9, 8, [5, 4]), (1, 8, [1]), (0, 8, []), (13, 1, [1] * 13)],
)
def test_group_sizes_are_as_even_as_possible(fresh: int, size: int, sizes: list[int]) -> None:
    assert group_sizes(fresh, size) == sizes
