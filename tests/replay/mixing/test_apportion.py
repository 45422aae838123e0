from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.mixing.apportion import Remainders, apportion, group_sizes
from replay.mixing.mix_settings import Schedule
from replay.mixing.mixer import with_completions
from replay.mixing.request import Pick
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from tests.fakes.records import FreshRows, new_store, request


@pytest.mark.parametrize(
    ("total", "shares", "parts"),
    [
        (10, [1 / 3, 1 / 3, 1 / 3], [4, 3, 3]),  # of equal remainders the first
        (5, [2, 1], [3, 2]),  # quotas 3.33 and 1.67
        (0, [1.0], [0]),
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


@pytest.mark.parametrize(
    ("fresh", "size", "sizes"),
    [(96, 8, [8] * 12), (85, 8, [8] * 8 + [7] * 3), (9, 8, [5, 4]), (1, 8, [1]), (0, 8, []), (13, 1, [1] * 13)],
)
def test_group_sizes_are_as_even_as_possible(fresh: int, size: int, sizes: list[int]) -> None:
    assert group_sizes(fresh, size) == sizes


def test_schedule_reaches_both_ends_exactly_and_one_iteration_is_its_beginning() -> None:
    for shape in ("linear", "cosine"):
        schedule = Schedule(shape=shape, final=0.7)
        assert [schedule.at(0.1, at, 5) for at in (1, 5)] == [0.1, 0.7]
        assert schedule.at(0.1, 1, 1) == 0.1
        assert (schedule.highest(0.1), schedule.highest(0.9)) == (0.7, 0.9)
    assert Schedule(shape="step", steps=((0.1, 0.4), (0.2, 0.1))).highest(0.2) == 0.4


def first(task: str, reward: float = 0.0, source: str | None = None) -> Pick:
    return Pick(1, source, task, reward_other_than=reward)


COMPLETED: list[tuple[list[Pick], list[tuple[str, float]], dict[tuple[str, float], int], tuple[Pick, ...]]] = [
    # Out of the largest pick.
    ([Pick(2, "teacher"), Pick(5, "self")], [("a", 0.0), ("b", 1.0)], {("a", 1.0): 3, ("b", 0.5): 1},
     (first("a", source="self"), first("b", 1.0, "self"), Pick(2, "teacher"), Pick(3, "self"))),
    # Of a same-task unit, out of the pick of its own group.
    ([Pick(2, task="a"), Pick(9, task="b")], [("a", 0.0)], {("a", 1.0): 2, ("b", 1.0): 9},
     (first("a"), Pick(1, task="a"), Pick(9, task="b"))),
    # What the buffer has nothing for stays as planned.
    ([Pick(3)], [("a", 0.0)], {("a", 0.0): 5, ("b", 1.0): 5}, (Pick(3),)),
    ([Pick(3, task="b")], [("a", 0.0)], {("a", 1.0): 5}, (Pick(3, task="b"),)),
    # One stored row completes one group, and there are never more than replayed rows.
    ([Pick(9)], [("a", 0.0), ("a", 0.0), ("b", 0.0)], {("a", 1.0): 1, ("b", 1.0): 4},
     (first("a"), first("b"), Pick(7))),
    ([Pick(1)], [("a", 0.0), ("a", 0.0), ("b", 0.0)], {("a", 1.0): 9, ("b", 1.0): 9}, (first("a"),)),
]  # fmt: skip


@pytest.mark.parametrize(("picks", "flat", "stored", "completed"), COMPLETED)
def test_groups_of_equal_rewards_are_completed_by_stored_rows_of_another(
    picks: list[Pick], flat: list[tuple[str, float]], stored: dict[tuple[str, float], int], completed: tuple[Pick, ...]
) -> None:
    assert with_completions(picks, flat, stored) == completed


def test_picks_draw_rows_of_another_reward_and_groups_of_the_stated_size(location: Location) -> None:
    with closing(new_store(location)) as store:
        FreshRows(1, rates=(0.5, 0.25)).append_to(store)
        FreshRows(2, rates=(0.5,), size=2).append_to(store)
        sampler = make_sampler("uniform", 0)
        available = store.available(request(3, 1), sampler)
        assert available.by_task_reward == {("task-1", 1.0): 4, ("task-1", 0.0): 6}
        assert available.groups == {4: 2, 2: 1}
        rewarded = replace(request(3, 1), picks=(Pick(9, task="task-1", reward_other_than=0.0),))
        assert [row.trajectory.record.reward for row in store.draw(rewarded, sampler)] == [1.0] * 4
        small = replace(request(3, 1), picks=(Pick(4, unit="group", size=2),), first_slot=20)
        assert [row.trajectory.record.iteration for row in store.draw(small, sampler)] == [2, 2]
