"""What the runs of an arm took to the target: medians over seeds, and beside the control, seed by seed.

A run that did not get there took longer than anybody knows: it counts as infinitely long, which medians bear and means
would not. Bootstrap (Efron 1979) over seeds, percentile intervals of 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks._replay_arms import TARGET, WAIT_S
from benchmarks._replay_runs import ITERATION, WINDOW, Result, recent_success

_RESAMPLES = 10_000
Key = tuple[str, int]
"""Task and seed."""
Costs = Mapping[Key, float]
"""What it took; infinite where the target was not reached."""


@dataclass(frozen=True)
class Interval:
    median: float
    low: float
    high: float


def spent(result: Result, name: str) -> np.ndarray:
    """What had been taken by the end of each iteration. `waited` is CPU-seconds and WAIT_S for each tool call."""
    column = {key: np.array(values, np.float64) for key, values in _columns(result).items()}
    return np.cumsum(column["cpu"] + WAIT_S * column["calls"] if name == "waited" else column[name])


def _columns(result: Result) -> dict[str, tuple[float, ...]]:
    return dict(zip(ITERATION, zip(*result["iterations"], strict=True), strict=True))


def courses(result: Result) -> tuple[list[list[float]], list[list[float]]]:
    """All that was counted, without seconds: the same for runs that learned alike."""
    return [row[: ITERATION.index("cpu")] for row in result["iterations"]], result["evaluations"]


def to_target(result: Result, name: str, *, in_a_row: int = 2) -> float:
    """What it had taken by the first evaluation of the first `in_a_row` ones that all reached the target."""
    evaluations = result["evaluations"]
    for start in range(len(evaluations) - in_a_row + 1):
        if all(success >= TARGET for _, success in evaluations[start : start + in_a_row]):
            return float(spent(result, name)[evaluations[start][0] - 1])
    return math.inf


def to_recent(result: Result, name: str, *, target: float = 0.8) -> float:
    """What it had taken when the newest WINDOW fresh episodes first succeeded this often; tasks are always new."""
    for iteration in range(1, len(result["iterations"]) + 1):
        if recent_success(result["iterations"][:iteration]) >= target:
            return float(spent(result, name)[iteration - 1])
    return math.inf


def recent_curve(result: Result) -> tuple[list[float], list[float]]:
    """Fresh episodes and the success of the newest of them, as far as there are enough; at the end, of evaluations."""
    rows = result["iterations"]
    seen = [(float(f), recent_success(rows[: i + 1])) for i, f in enumerate(spent(result, "fresh")) if f >= WINDOW]
    end = (seen[-1][0] + WINDOW / 2, last_success(result))
    return [fresh for fresh, _ in [*seen, end]], [success for _, success in [*seen, end]]


def last_success(result: Result) -> float:
    return float(np.mean([success for _, success in result["evaluations"][-2:]]))


def mean_success(result: Result, episodes: int) -> float:
    """Of the first so many fresh episodes; those after the end of a run succeed as its last evaluations did."""
    column = _columns(result)
    each = np.repeat(column["success"], np.array(column["fresh"], int))[:episodes]
    return float(each.sum() + (episodes - len(each)) * last_success(result)) / episodes


def costs(results: Sequence[Result], measure: Callable[[Result], float]) -> dict[Key, float]:
    return {(result["task"], result["seed"]): measure(result) for result in results}


def interval(values: Sequence[float]) -> Interval:
    """The median with its bootstrap interval; ends may be infinite, as observations are."""
    observed = np.asarray(values, np.float64)
    random = np.random.Generator(np.random.PCG64(0))
    drawn = _medians(observed[random.integers(0, len(observed), (_RESAMPLES, len(observed)))])
    low, high = (float(np.sort(drawn)[round(share * (_RESAMPLES - 1))]) for share in (0.025, 0.975))
    return Interval(float(_medians(observed[None])[0]), low, high)


def _medians(rows: np.ndarray) -> np.ndarray:
    """Of an even number, the mean of the middle two: infinite if one is, and 0 if they are so in both directions."""
    ordered = np.sort(rows, axis=1)
    low, high = ordered[:, (rows.shape[1] - 1) // 2], ordered[:, rows.shape[1] // 2]
    opposite = np.isinf(low) & np.isinf(high) & (low != high)
    return np.where(low == high, low, np.where(opposite, 0.0, low / 2 + np.where(opposite, 0.0, high / 2)))


def beside(control: Costs, arm: Costs) -> Interval | None:
    """Median difference to the control over the tasks and seeds both have; None without any.

    One that neither got there with counts as no difference, one that only the arm did not as infinitely worse.
    """
    both = [key for key in arm if key in control]
    if not both:
        return None
    return interval([0.0 if arm[key] == control[key] else arm[key] - control[key] for key in both])
