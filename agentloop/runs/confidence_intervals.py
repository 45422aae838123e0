"""How far a figure of an evaluation can be trusted: 95 % confidence intervals, each named by its kind."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

CONFIDENCE = 0.95
_Z = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""
_RESAMPLES = 10_000
_AT_ONCE = 1 << 20
"""Drawn task numbers in memory."""


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float
    interval: Literal["wilson", "bootstrap"]


def wilson(successes: float, trials: int) -> Estimate:
    """A proportion of independent trials with Wilson's score interval (Wilson 1927), which holds near 0 and 1 too.

    Centre (p + z^2 / 2n) / (1 + z^2 / n), half-width z sqrt(p (1 - p) / n + z^2 / 4n^2) / (1 + z^2 / n).
    Where a trial is a share of several samples, not 0 or 1, it is wider than it need be.
    """
    p = successes / trials
    scale = 1.0 + _Z**2 / trials
    centre = (p + _Z**2 / (2 * trials)) / scale
    half = _Z * math.sqrt(p * (1.0 - p) / trials + _Z**2 / (4 * trials**2)) / scale
    # At 0 and all, the bound on that side is the value itself, up to rounding.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return Estimate(p, low, high, "wilson")


def bootstrap(task_values: Sequence[float], *, seed: int) -> Estimate:
    """The mean of a figure that each task has one of, with the percentile interval over resampled tasks (Efron 1979).

    Samples of one task are no independent trials: tasks are what is drawn again, with all that belongs to them.
    """
    values = np.asarray(task_values, np.float64)
    random = np.random.Generator(np.random.PCG64(seed))
    at_once = max(1, _AT_ONCE // len(values))
    means: list[float] = []
    while len(means) < _RESAMPLES:
        count = min(at_once, _RESAMPLES - len(means))
        means += values[random.integers(0, len(values), (count, len(values)))].mean(axis=1).tolist()
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return Estimate(sum(task_values) / len(task_values), low, high, "bootstrap")


def proportion(task_values: Sequence[float], *, single: bool, seed: int) -> Estimate:
    """The mean of a share that each task has one of; with `single`, of one trial per task.

    Wilson for single trials. Otherwise the bootstrap, but where all tasks are at 0 or all at 1: it would know of no
    deviation at all, so each task counts as one trial of Wilson's, which is the wider the fewer there are.
    """
    total = sum(task_values)
    if single or total in (0.0, float(len(task_values))):
        return wilson(round(total), len(task_values))
    return bootstrap(task_values, seed=seed)


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Probability that one of k samples of a task succeeds: 1 - C(n - c, k) / C(n, k), unbiased for k <= n.

    Chen et al. 2021, arXiv 2107.03374. In whole numbers, so nothing overflows.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k must be from 1 to the number of samples ({samples}), got {k}.")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)
