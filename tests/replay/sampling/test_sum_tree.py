from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.sampling.sum_tree import SumTree, draw_some

weights = st.one_of(st.just(0.0), st.floats(1e-300, 1e300), st.integers(1, 9).map(float))


@settings(max_examples=40)
@given(st.lists(weights, min_size=1, max_size=80), st.data())
def test_tree_of_the_same_weights_is_the_same_whatever_happened_before(
    values: list[float], data: st.DataObject
) -> None:
    wanted = np.array(values)
    tree = SumTree(np.array(data.draw(st.lists(weights, max_size=300))))
    tree.fill(wanted[:1])
    tree.extend(len(wanted))
    for _ in range(3):
        at = np.array(sorted(data.draw(st.sets(st.integers(0, len(wanted) - 1)))), np.intp)
        tree.put(at, np.arange(len(at), dtype=np.float64))
    order = np.array(data.draw(st.permutations(range(len(wanted)))), np.intp)
    half = len(order) // 2
    tree.put(order[:half], wanted[order[:half]])
    tree.put(order[half:], wanted[order[half:]])
    shares = np.linspace(0.0, 1.0, 50, endpoint=False)
    assert tree.weights.tolist() == values
    assert tree.total == SumTree(wanted).total
    if tree.total > 0.0:
        assert tree.find(shares).tolist() == SumTree(wanted).find(shares).tolist()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=300).filter(any), st.lists(st.floats(0, 1, exclude_max=True)))
def test_position_found_is_the_one_of_the_running_sum(values: list[int], shares: list[float]) -> None:
    # Whole numbers are summed without rounding: the first position whose running sum is beyond the point.
    sums = np.cumsum(values)
    points = np.array(shares) * sums[-1]
    assert (
        SumTree(np.array(values, float)).find(np.array(shares)).tolist()
        == np.searchsorted(sums, points, side="right").tolist()
    )


@given(st.lists(weights, min_size=1, max_size=100).filter(any), st.lists(st.floats(0, 1, exclude_max=True)))
def test_weight_zero_is_never_found(values: list[float], shares: list[float]) -> None:
    tree = SumTree(np.array(values))
    if np.isfinite(tree.total):
        assert (tree.weights[tree.find(np.array([*shares, 1 - 2**-53]))] > 0).all()


def test_restored_takes_everything_back() -> None:
    tree = SumTree(np.arange(100.0))
    with tree.restored():
        tree.put(np.array([3, 5]), 7.0)
        tree.put(np.array([5, 90]), 0.0)
        assert tree.weights[[3, 5, 90]].tolist() == [7.0, 0.0, 0.0]
    assert tree.weights.tolist() == list(range(100))
    assert tree.total == 4950.0


def test_some_are_drawn_once_and_weigh_nothing_afterwards() -> None:
    tree, random = SumTree(np.array([1.0, 0.0, 3.0, 1.0])), np.random.default_rng(0)
    found: list[int] = []
    while tree.total > 0:
        positions, drawn = draw_some(tree, 4 - len(found), random)
        assert drawn.tolist() == [[1.0, 0.0, 3.0, 1.0][at] for at in positions]
        found += positions.tolist()
    assert sorted(found) == [0, 2, 3]


def test_second_position_is_proportional_to_the_weights_that_are_left() -> None:
    random, seconds = np.random.default_rng(3), []
    for _ in range(3000):
        tree, found = SumTree(np.array([4.0, 2.0, 1.0, 1.0])), []
        while len(found) < 2:
            found += draw_some(tree, 2 - len(found), random)[0].tolist()
        if found[0] == 0:
            seconds.append(found[1])
    # After the first has gone: 2 : 1 : 1. 13.82 is the 99.9 % quantile of chi-square with two degrees of freedom.
    expected = len(seconds) * np.array([0.5, 0.25, 0.25])
    assert ((np.bincount(seconds, minlength=4)[1:] - expected) ** 2 / expected).sum() < 13.82


def test_empty_tree_has_no_total() -> None:
    assert SumTree().total == 0.0
    assert len(SumTree()) == 0


@pytest.mark.parametrize("size", [64, 65, 1000])
def test_total_is_the_sum(size: int) -> None:
    assert SumTree(np.ones(size)).total == size
