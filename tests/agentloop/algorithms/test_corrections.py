import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from agentloop.algorithms.corrections import Correction, correct

Array = npt.NDArray[np.float64]


def correction(kind: Any, level: Any = "token", mean: Any = "product", **bounds: float | None) -> Correction:
    return Correction(kind, level, mean, **bounds)


def units_of(mask: npt.NDArray[np.bool_], trajectory: list[int], level: str) -> list[list[tuple[int, int]]]:
    """Positions of each unit, in order, trajectory by trajectory."""
    units: list[list[tuple[int, int]]] = []
    for owner in sorted(set(trajectory)):
        mine: list[list[tuple[int, int]]] = []
        for i in [i for i, other in enumerate(trajectory) if other == owner]:
            for t in np.flatnonzero(mask[i]).tolist():
                begins = level == "token" or (level == "turn" and (t == 0 or not mask[i, t - 1]))
                if begins or not mine:
                    mine.append([])
                mine[-1].append((i, t))
        units += mine
    return units


def written(
    old: Array, behavior: Array, mask: npt.NDArray[np.bool_], trajectory: list[int], how: Correction
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """The formulas, unit by unit."""
    weights, kept = np.ones(old.shape), np.ones(old.shape, bool)
    ratios: list[float] = []
    units = units_of(mask, trajectory, how.level)
    for unit in units:
        drifts = [
            min(20.0, max(-20.0, old[place] - behavior[place])) for place in unit if math.isfinite(behavior[place])
        ]
        log = math.fsum(drifts)
        if how.mean == "geometric" and drifts:
            log /= len(drifts)
        ratios.append(math.exp(min(20.0, max(-20.0, log))))
    low, high = how.ratio_low, how.ratio_high
    owners = [trajectory[unit[0][0]] for unit in units]
    for index, (unit, w) in enumerate(zip(units, ratios, strict=True)):
        after = [later for later in range(index + 1, len(units)) if owners[later] == owners[index]]
        value = {"truncate": min(w, high), "mask": w * (low <= w <= high), "rejection": 1.0}.get(how.kind, 1.0)
        if how.kind == "v_trace":
            value = min(w, high)
            for later in after:
                value *= min(ratios[later], high if later == after[-1] else how.trace_high)
        for place in unit:
            weights[place] = value
            kept[place] = how.kind != "rejection" or low <= w <= high
    return weights, kept


KINDS = [
    {"kind": "none"},
    {"kind": "truncate", "ratio_high": 2.0},
    {"kind": "mask", "ratio_low": 0.5, "ratio_high": 3.0},
    {"kind": "mask", "ratio_low": 0.7},
    {"kind": "rejection", "ratio_high": 2.0},
    {"kind": "rejection", "ratio_low": 0.5, "ratio_high": 2.0},
    {"kind": "v_trace", "ratio_high": 1.0, "trace_high": 1.0},
    {"kind": "v_trace", "ratio_high": 2.5, "trace_high": 0.9},
]


@pytest.mark.parametrize("mean", ["product", "geometric"])
@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
@pytest.mark.parametrize("bounds", KINDS, ids=lambda bounds: bounds["kind"])
def test_weights_equal_the_written_formula(bounds: dict[str, Any], level: str, mean: str) -> None:
    rejected = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        shape = (30, 19)
        mask = rng.random(shape) < 0.7
        mask[4] = False
        trajectory = np.sort(rng.integers(0, 15, 30)).tolist()
        old = rng.uniform(-8, 0, shape)
        behavior = old - np.where(rng.random(shape) < 0.02, rng.uniform(-30, 30, shape), rng.normal(0, 0.2, shape))
        behavior[rng.random(shape) < 0.1] = np.nan
        behavior[~mask] = rng.choice([np.nan, np.inf, -np.inf, 95.0], int((~mask).sum()))
        how = correction(level=level, mean=mean, **bounds)
        found = correct(
            torch.tensor(old),
            torch.tensor(behavior),
            response_mask=torch.tensor(mask),
            trajectory=torch.tensor(trajectory),
            correction=how,
        )
        weights, kept = written(old, behavior, mask, trajectory, how)
        np.testing.assert_allclose(found.weights.numpy(), weights, rtol=1e-6)
        assert (found.kept.numpy() == kept).all()
        rejected.append((mask & ~kept).sum() / mask.sum())
    assert (0 < np.mean(rejected) < 1) == (bounds["kind"] == "rejection")


def weights_of(rows: list[str], ratios: list[list[float]], how: Correction, trajectory: list[int]) -> Array:
    """Rows as letters: a an action token, . another."""
    mask = torch.tensor([[letter == "a" for letter in row] for row in rows])
    drift = torch.zeros(mask.shape, dtype=torch.float64)
    for row, places, values in zip(drift, mask, ratios, strict=True):
        row[places] = torch.tensor(values, dtype=torch.float64).log()
    found = correct(
        drift,
        torch.zeros_like(drift),
        response_mask=mask,
        trajectory=torch.tensor(trajectory),
        correction=how,
    )
    return np.where(found.kept.numpy(), found.weights.numpy(), np.nan)


ROWS = [".aa.a", "..aa."]
RATIOS = [[2.0, 0.5, 4.0], [3.0, 0.25]]
NAN = math.nan


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (correction("truncate", ratio_high=2.5), [[1, 2, 0.5, 1, 2.5], [1, 1, 2.5, 0.25, 1]]),
        (correction("mask", ratio_low=0.5, ratio_high=3.0), [[1, 2, 0.5, 1, 0], [1, 1, 3, 0, 1]]),
        (correction("rejection", ratio_low=0.5, ratio_high=3.0), [[1, 1, 1, 1, NAN], [1, 1, 1, NAN, 1]]),
        # Turns: 2 x 0.5 = 1, 4, 3 x 0.25 = 0.75.
        (correction("truncate", "turn", ratio_high=2.0), [[1, 1, 1, 1, 2], [1, 1, 0.75, 0.75, 1]]),
        # Their geometric means: 1, 4, sqrt(0.75).
        (
            correction("mask", "turn", "geometric", ratio_high=2.0),
            [[1, 1, 1, 1, 0], [1, 1, 0.75**0.5, 0.75**0.5, 1]],
        ),
        # The trajectory, over both rows: 2 x 0.5 x 4 x 3 x 0.25 = 3.
        (correction("truncate", "sequence", ratio_high=9.0), [[1, 3, 3, 1, 3], [1, 1, 3, 3, 1]]),
        (
            correction("truncate", "sequence", "geometric", ratio_high=9.0),
            [[1, 3**0.2, 3**0.2, 1, 3**0.2], [1, 1, 3**0.2, 3**0.2, 1]],
        ),
        # Turns 1, 4, 0.75 in order, bounds 2 and 1: 1 x 1 x 0.75, 2 x 0.75, 0.75.
        (
            correction("v_trace", "turn", ratio_high=2.0, trace_high=1.0),
            [[1, 0.75, 0.75, 1, 1.5], [1, 1, 0.75, 0.75, 1]],
        ),
        # Tokens 2, 0.5, 4, 3, 0.25, bounds 1: 1 x 0.5 x 1 x 1 x 0.25, 0.5 x 1 x 1 x 0.25, 0.25, 0.25, 0.25.
        (
            correction("v_trace", ratio_high=1.0, trace_high=1.0),
            [[1, 0.125, 0.125, 1, 0.25], [1, 1, 0.25, 0.25, 1]],
        ),
        # One unit: truncated.
        (correction("v_trace", "sequence", ratio_high=2.0, trace_high=1.0), [[1, 2, 2, 1, 2], [1, 1, 2, 2, 1]]),
    ],
)
def test_weights_equal_hand_computed_values(how: Correction, expected: list[list[float]]) -> None:
    """One trajectory of two segments, its turns being aa, a and aa."""
    np.testing.assert_allclose(weights_of(ROWS, RATIOS, how, [0, 0]), expected, rtol=1e-12)


def test_weights_of_a_trajectory_know_nothing_of_the_others() -> None:
    for how in (correction("truncate", "sequence", ratio_high=9.0), correction("v_trace", ratio_high=1, trace_high=1)):
        both = weights_of(ROWS, RATIOS, how, [1, 0])
        for row in (0, 1):
            np.testing.assert_allclose(both[row : row + 1], weights_of([ROWS[row]], [RATIOS[row]], how, [0]))


def test_product_over_thousands_of_tokens_is_bounded_before_it_overflows() -> None:
    tokens, ratio = "." + "a" * 3000, [math.exp(1.0)] * 3000
    for how in (correction("truncate", "sequence", ratio_high=2.0), correction("mask", "sequence", ratio_low=0.5)):
        weights = weights_of([tokens], [ratio], how, [0])
        assert weights[0, 1] == pytest.approx(2.0 if how.kind == "truncate" else math.exp(20))
