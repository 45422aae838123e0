import math
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay import Rows, Sampler
from replay.mixing.request import DrawRequest
from replay.sampling.samplers import SAMPLERS, make_sampler
from replay.sampling.selection import draw_in_turn
from tests.fakes.records import Fresh, draw, new_store, request

# Rows of a buffer made by hand: four of each of these groups of eight, by successes of the group.
SUCCESSES = (0, 2, 4, 6, 8)
NOW = DrawRequest("run", iteration=12, policy_version=11)


def columns(**changes: Any) -> dict[str, np.ndarray]:
    """Ten rows, two per group; one of the last group is another run's."""
    rates = np.repeat(np.array(SUCCESSES) / 8, 2)
    made: dict[str, np.ndarray] = {
        "own": np.array([True] * 9 + [False]),
        "iteration": np.array([2, 2, 4, 4, 6, 6, 8, 8, 10, 10]),
        "policy_version": np.array([1, 1, 3, 3, 5, 5, 7, 7, 9, 9]),
        "success": np.array([False, False, True, False, True, False, True, True, True, True]),
        "reward": np.array([0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]),
        "advantage": np.array([0.0, 0.0, 1.5, -0.5, 1.0, -1.0, 0.5, -2.0, 0.0, 0.0]),
        "num_action_tokens": np.arange(10) + 5,
        "mean_entropy": np.array([0.1, np.nan, 0.3, 0.2, 0.5, 0.9, np.nan, 0.7, 0.6, 0.6]),
        "group": np.repeat(np.arange(5), 2),
        "task": np.zeros(10, np.int64),
        "group_size": np.full(10, 8),
        "group_success_rate": rates,
        "group_reward_std": np.sqrt(rates * (1 - rates)),
    }
    return {**made, **changes}


def weighed(name: str, options: dict[str, Any] | None = None, now: DrawRequest = NOW, **changes: Any) -> list[float]:
    return make_sampler(name, 0, options).weigh(Rows(columns(**changes), slice(None), now))[0].tolist()


WEIGHTS: list[tuple[str, dict[str, Any], list[float]]] = [
    # Staleness 10 10 8 8 6 6 4 4 2, and unknown of the other run's.
    ("recency", {"half_life": 2.0}, [2**-5, 2**-5, 2**-4, 2**-4, 2**-3, 2**-3, 2**-2, 2**-2, 2**-1, 0.0]),
    ("fifo_window", {"window": 6}, [0.0] * 4 + [1.0] * 5 + [0.0]),  # iterations 6 to 11
    ("success", {}, [0.0, 0.0, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0.0, 0.0]),  # what is hard, and nothing of constants
    ("max_variance_group", {}, [0.0, 0.0, 0.1875, 0.1875, 0.25, 0.25, 0.1875, 0.1875, 0.0, 0.0]),  # p (1 - p)
    ("advantage", {"exponent": 2.0}, [0, 0, 2.25, 0.25, 1.0, 1.0, 0.25, 4.0, 0, 0]),
    ("advantage", {"exponent": 0.0}, [0, 0, 1, 1, 1, 1, 1, 1, 0, 0]),
    # exp(-(k - 4)^2 / 2) for k = 0, 2, 4, 6, 8; exp(-(k - 4)^2 / 8).
    ("difficulty", {}, np.repeat(np.exp([-8.0, -2.0, 0.0, -2.0, -8.0]), 2).tolist()),
    ("difficulty", {"sigma": 2.0}, np.repeat(np.exp([-2.0, -0.5, 0.0, -0.5, -2.0]), 2).tolist()),
]


@pytest.mark.parametrize(("name", "options", "expected"), WEIGHTS)
def test_rows_weigh_by_the_formula_of_their_sampler(name: str, options: dict[str, Any], expected: list[float]) -> None:
    assert weighed(name, options) == pytest.approx(expected)


@pytest.mark.parametrize("elsewhere", [{"own": np.full(10, False)}, {"group_size": np.full(10, 1)}])
def test_success_estimates_what_is_hard_where_no_group_of_the_run_says_it(elsewhere: dict[str, Any]) -> None:
    """A teacher's group, and one of a single row, as in hindsight: (failures + 1) / (members + 2)."""
    size, rate = (8, columns()["group_success_rate"]) if "own" in elsewhere else (1, np.repeat([0.0, 1.0], 5))
    weights = weighed("success", group_success_rate=rate, advantage=np.ones(10), **elsewhere)
    # Of 8 members 0, 2, 4, 6, 8 successes; of one, none or one.
    expected = [0.9, 0.9, 0.7, 0.7, 0.5, 0.5, 0.3, 0.3, 0.1, 0.1] if size == 8 else [2 / 3] * 5 + [1 / 3] * 5
    assert weights == pytest.approx(expected)
    # A row of advantage 0 teaches nothing, wherever it is from.
    assert weighed("success", advantage=np.zeros(10), **elsewhere) == [0.0] * 10


def test_freshness_ages_the_weights_of_advantage() -> None:
    options = {"exponent": 1.0, "tau": 2.0}
    # |A| exp(-staleness / 2), relative to the row of advantage 1 and staleness 6.
    weights = weighed("freshness", options)
    assert weights[2] / weights[4] == pytest.approx(1.5 * math.exp(-1))
    assert weights[7] / weights[4] == pytest.approx(2.0 * math.exp(1))
    assert weights[8:] == [0.0, 0.0]
    assert make_sampler("freshness", 0, options).correction(0.4, 10) == pytest.approx(4.0**-0.4)


def test_rewards_weigh_exponentially_and_odd_rows_what_can_be_known_of_them() -> None:
    assert weighed("success", group_reward_std=np.full(10, 0.1))[:2] == [1.0, 1.0]  # hopeless, of graded rewards
    rewarded = weighed("reward", {"temperature": 0.5})
    assert rewarded[2] / rewarded[0] == pytest.approx(math.exp(2))
    assert np.isfinite(weighed("reward", reward=np.full(10, -1e300))).all()
    _, unknown = make_sampler("entropy", 0).weigh(Rows(columns(), slice(None), NOW))
    assert np.flatnonzero(unknown).tolist() == [1, 6]
    _, unknown = make_sampler("recency", 0).weigh(Rows(columns(), slice(None), NOW))
    assert np.flatnonzero(unknown).tolist() == [9]


@pytest.mark.parametrize("name", SAMPLERS)
def test_equal_rows_weigh_alike(name: str) -> None:
    same = {key: np.repeat(column[4:5], 10) for key, column in columns().items()}
    weights = weighed(name, **same)
    assert weights == [weights[0]] * 10
    assert weights[0] > 0


def test_drawing_in_turn_is_drawing_again_and_again_without_what_was_drawn() -> None:
    """Of weights 1, 2, 3 the order is (i, j, k) with probability w_i / 6 x w_j / (6 - w_i)."""
    random, weights, rounds = np.random.default_rng(3), np.array([1.0, 0.0, 2.0, 3.0]), 6000
    orders = [tuple(draw_in_turn(weights, first, random)) for first in (1, 2, 9) for _ in range(rounds // 3)]
    found = 0.0
    for order in permutations((0, 2, 3)):
        expected = rounds * weights[order[0]] / 6 * weights[order[1]] / (6 - weights[order[0]])
        found += (orders.count(order) - expected) ** 2 / expected
    assert found < 20.52  # the 99.9 % quantile of chi-square with 5 degrees of freedom
    assert list(draw_in_turn(np.zeros(3), 2, random)) == []
    # Beyond what floats can tell apart, the heavier rows still come first.
    assert next(draw_in_turn(np.array([1e-300, 1e300, 1e-320]), 1, random)) == 1


def drawn_entropies(path: Path, options: dict[str, Any]) -> list[float]:
    """Entropies of three rows drawn from ten of 0 to 0.8 and one that is unknown; in order of the draw."""
    store = new_store(path)
    collected = Fresh(1, rates=(0.5,), size=10)
    values = {row.id: None if at == 9 else at / 10 for at, row in enumerate(collected.trajectories)}
    collected.trajectories = [
        replace(row, record=replace(row.record, mean_entropy=values[row.id])) for row in collected.trajectories
    ]
    collected.append_to(store)

    drawn = store.draw(request(2, 3), make_sampler("entropy", 1, options))
    assert {row.draw.probability for row in drawn} <= {None}
    return [values[row.trajectory.id] or 0.0 for row in drawn]


def test_entropy_takes_the_surest_and_never_the_unknown(tmp_path: Path) -> None:
    assert drawn_entropies(tmp_path / "a", {"pool": 99}) == [0.0, 0.1, 0.2]
    # Two candidates for each of three rows: the surest three of six.
    found = drawn_entropies(tmp_path / "b", {"pool": 2})
    assert found == sorted(found)
    assert found[-1] <= 0.5


WRONG_OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("recency", {"halflife": 2}, "must hold options of recency, got 'halflife'. Did you mean half_life"),
    ("recency", {"half_life": -1}, r"replay.sampler_options.half_life must be greater than 0, got -1"),
    ("fifo_window", {"window": 2.5}, r"replay.sampler_options.window must be a valid integer, got 2.5"),
    ("uniform", {"x": 1}, r"must hold options of uniform, got 'x'. There is none"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG_OPTIONS)
def test_options_are_checked(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_sampler(name, 0, options)


@pytest.mark.parametrize("wrong", [np.full(10, -1.0), np.full(10, np.nan), np.full(10, np.inf), np.ones(3), 1.0])
def test_weights_that_are_none_are_refused(wrong: Any) -> None:
    class Wrong(Sampler):
        def weights(self, rows: Rows) -> Any:
            return wrong

    with pytest.raises(ValueError, match="weights of sampler Wrong must be"):
        make_sampler(Wrong, 0).weigh(Rows(columns(), slice(None), NOW))


def test_selection_of_a_seed_is_the_same_on_every_machine(tmp_path: Path) -> None:
    store = new_store(tmp_path / "replay.sqlite")
    Fresh(1, rates=(0.5,), size=10).append_to(store)
    drawn = draw(store, 2, 5)
    times = np.random.Generator(np.random.PCG64(0)).standard_exponential(10)
    # Rows alike, of which those of the shortest waiting times are drawn.
    assert [row.trajectory.record.slot for row in drawn] == np.argsort(times)[:5].tolist() == [3, 2, 4, 6, 0]
