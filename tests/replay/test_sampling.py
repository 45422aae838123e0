from __future__ import annotations

import json

import numpy as np
import pytest

from replay.sampling import Candidates, SuccessSampler, make_sampler

# 99.9 % quantiles of the chi-square distribution, by degrees of freedom.
CHI_SQUARE = {3: 16.27, 9: 27.88}


def candidates(rates: list[float]) -> Candidates:
    texts = np.array([""] * len(rates), object)
    ids = [f"t{i}" for i in range(len(rates))]
    return Candidates(
        ids, np.array(rates), texts, texts, texts, texts, np.ones(len(rates), np.int64), np.ones(len(rates))
    )


def frequencies(name: str, rates: list[float], rounds: int) -> np.ndarray:
    sampler = make_sampler(name, 7)
    weights = sampler.weights(candidates(rates))
    picks = [int(sampler.select(weights, 1)[0]) for _ in range(rounds)]
    return np.bincount(picks, minlength=len(rates))


def chi_square(found: np.ndarray, expected: np.ndarray) -> float:
    return float(((found - expected) ** 2 / expected).sum())


def test_success_weight_is_one_minus_the_groups_success_rate() -> None:
    assert SuccessSampler(0).weights(candidates([0.0, 0.25, 0.75, 1.0])).tolist() == [1.0, 0.75, 0.25, 0.0]


def test_uniform_draws_all_rows_alike() -> None:
    found = frequencies("uniform", [0.0] * 10, 10_000)
    assert chi_square(found, np.full(10, 1000.0)) < CHI_SQUARE[9]


def test_success_draws_in_proportion_to_its_weights() -> None:
    found = frequencies("success", [0.0, 0.5, 0.75, 0.875, 1.0], 15_000)
    # Weights 8 : 4 : 2 : 1 : 0 of 15.
    assert found[4] == 0
    assert chi_square(found[:4], np.array([8000.0, 4000.0, 2000.0, 1000.0])) < CHI_SQUARE[3]


def test_second_pick_is_proportional_to_the_weights_that_are_left() -> None:
    sampler = make_sampler("success", 3)
    weights = sampler.weights(candidates([0.5, 0.75, 0.875, 0.875]))  # 4 : 2 : 1 : 1
    seconds = [int(second) for first, second in (sampler.select(weights, 2) for _ in range(8000)) if first == 0]
    found = np.bincount(seconds, minlength=4)[1:]
    # After the first row has gone: 2 : 1 : 1.
    assert chi_square(found, len(seconds) * np.array([0.5, 0.25, 0.25])) < CHI_SQUARE[3]


def test_selection_is_without_replacement_and_never_of_weight_zero() -> None:
    sampler = make_sampler("success", 1)
    weights = sampler.weights(candidates([1.0, 0.5, 1.0, 0.5, 0.0]))
    assert sorted(sampler.select(weights, 100).tolist()) == [1, 3, 4]


def test_empty_candidates_give_an_empty_selection() -> None:
    sampler = make_sampler("uniform", 1)
    assert sampler.select(sampler.weights(candidates([])), 4).tolist() == []


def test_state_survives_json_and_continues_the_same_sequence() -> None:
    first = make_sampler("uniform", 5)
    weights = np.ones(50)
    first.select(weights, 3)
    state = json.loads(json.dumps(first.state()))
    second = make_sampler("uniform", 99)
    second.load_state(state)
    assert [first.select(weights, 5).tolist() for _ in range(3)] == [
        second.select(weights, 5).tolist() for _ in range(3)
    ]


def test_selection_of_a_seed_is_the_same_on_every_machine() -> None:
    # PCG64(0) gives .637 .270 .041 .017 .813 .913 .607 .729 .544 .935: equal weights take the smallest.
    assert make_sampler("uniform", 0).select(np.ones(10), 5).tolist() == [3, 2, 1, 8, 6]


def test_state_of_another_sampler_is_refused() -> None:
    with pytest.raises(ValueError, match="replay.sampler must be the one the state was saved by"):
        make_sampler("uniform", 0).load_state(make_sampler("success", 0).state())


def test_unknown_sampler_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="must be one of uniform, success, got 'sucess'"):
        make_sampler("sucess", 0)
