import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from agentloop.algorithms.corrections import Correction, correct

Array = npt.NDArray[np.float64]


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
        drifts = [min(20.0, max(-20.0, old[i] - behavior[i])) for i in unit if math.isfinite(behavior[i])]
        log = math.fsum(drifts)
        if how.mean == "geometric" and drifts:
            log /= len(drifts)
        ratios.append(math.exp(min(20.0, max(-20.0, log))))
    low, high = how.ratio_low, how.ratio_high
    for unit, w in zip(units, ratios, strict=True):
        value = {"truncate": min(w, high), "mask": w * (low <= w <= high), "rejection": 1.0}.get(how.kind, 1.0)
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
]


@pytest.mark.parametrize("mean", ["product", "geometric"])
@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
@pytest.mark.parametrize("bounds", KINDS, ids=lambda bounds: bounds["kind"])
def test_weights_equal_the_written_formula(bounds: dict[str, Any], level: Any, mean: Any) -> None:
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
        how = Correction(level=level, mean=mean, **bounds)
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
