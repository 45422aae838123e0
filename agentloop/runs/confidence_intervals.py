"""95 % confidence intervals of an evaluation's figures, each with the name of its kind."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from replay.questions.runs import wilson_bounds

CONFIDENCE = 0.95
_RESAMPLES = 10_000


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float
    interval: Literal["wilson", "bootstrap"]


def wilson(successes: float, trials: int) -> Estimate:
    """A proportion of independent trials with Wilson's score interval (Wilson 1927), which is valid near 0 and 1, too.

    The interval is wider than necessary where a trial is a share of several samples instead of 0 or 1.
    """
    share = successes / trials
    return Estimate(share, *wilson_bounds(share, trials), "wilson")


def bootstrap(task_values: Sequence[float], *, seed: int) -> Estimate:
    """The mean of one value per task, with the percentile interval over resampled tasks (Efron 1979).

    Samples of one task are not independent trials, so whole tasks are drawn again.
    """
    values = np.asarray(task_values, np.float64)
    random = np.random.Generator(np.random.PCG64(seed))
    means = [values[random.integers(0, len(values), len(values))].mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return Estimate(sum(task_values) / len(task_values), low, high, "bootstrap")


def proportion(task_values: Sequence[float], *, single: bool, seed: int) -> Estimate:
    """The mean of one share per task; with `single`, each task had one trial.

    Single trials have Wilson's interval, others the bootstrap's. If all tasks are at 0, or all at 1, the bootstrap
    would find no deviation. Then each task counts as one trial of Wilson's interval, which is wider for fewer tasks.
    """
    total = sum(task_values)
    if single or total in (0.0, float(len(task_values))):
        return wilson(round(total), len(task_values))
    return bootstrap(task_values, seed=seed)


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Probability that one of k samples of a task succeeds: 1 - C(n - c, k) / C(n, k), unbiased for k <= n.

    Chen et al. 2021, arXiv 2107.03374. Whole numbers are used, so nothing overflows.
    """
    return 1.0 - pass_hat_k(samples, samples - successes, k)


def pass_hat_k(samples: int, successes: int, k: int) -> float:
    """Probability that all of k samples of a task succeed, pass^k: C(c, k) / C(n, k), unbiased for k <= n.

    Yao et al. 2024, arXiv 2406.12045.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k must be from 1 to the number of samples ({samples}), got {k}.")
    return math.comb(successes, k) / math.comb(samples, k)
