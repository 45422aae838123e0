"""What the runs of an arm took to the target: medians over seeds, and beside another arm, seed by seed.

A run that did not get there took longer than anybody knows: it counts as infinitely long, which medians bear and means
would not. Intervals are the middle 95 % of a bootstrap (Efron 1979) over start models, each with all seeds that begin
with it: what such seeds have in common is no evidence twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise

import numpy as np

from benchmarks._replay_arms import STARTS, TARGET
from benchmarks._replay_runs import ITERATION, WINDOW, Result, recent_success

Costs = Mapping[int, float]
"""By seed; infinite where the target was not reached."""


@dataclass(frozen=True)
class Interval:
    median: float
    low: float
    high: float


def spent(result: Result, name: str) -> np.ndarray:
    """What had been taken by the end of each iteration."""
    return np.cumsum(_column(result, name))


def _column(result: Result, name: str) -> np.ndarray:
    place = ITERATION.index(name)
    return np.array([row[place] for row in result["iterations"]], np.float64)


def to_target(result: Result, name: str) -> float:
    """What it had taken by the first evaluation of the first two in a row that both reached the target."""
    evaluations = result["evaluations"]
    for (iteration, success), (_, following) in pairwise(evaluations):
        if min(success, following) >= TARGET:
            return float(spent(result, name)[iteration - 1])
    return math.inf


def to_recent(result: Result, name: str, *, target: float = 0.8) -> float:
    """What it had taken when the newest WINDOW fresh episodes first succeeded this often; tasks are always new."""
    for iteration in range(1, len(result["iterations"]) + 1):
        if recent_success(result["iterations"][:iteration], WINDOW) >= target:
            return float(spent(result, name)[iteration - 1])
    return math.inf


def recent_curve(result: Result) -> tuple[list[float], list[float]]:
    """Fresh episodes and the success of the newest of them, as far as there are enough; at the end, of evaluations."""
    rows = result["iterations"]
    seen = [
        (float(fresh), recent_success(rows[: place + 1], WINDOW))
        for place, fresh in enumerate(spent(result, "fresh"))
        if fresh >= WINDOW
    ]
    last = seen[-1][0] if seen else 0.0
    end = (last + WINDOW / 2, last_success(result))
    return [fresh for fresh, _ in [*seen, end]], [success for _, success in [*seen, end]]


def last_success(result: Result) -> float:
    return float(np.mean([success for _, success in result["evaluations"][-2:]]))


def mean_success(result: Result, episodes: int) -> float:
    """Of the first so many fresh episodes; those after the end of a run succeed as its last evaluations did."""
    each = np.repeat(_column(result, "success"), _column(result, "fresh").astype(int))[:episodes]
    return float(each.sum() + (episodes - len(each)) * last_success(result)) / episodes


def costs(results: Sequence[Result], measure: Callable[[Result], float]) -> dict[int, float]:
    return {result["seed"]: measure(result) for result in results}


def interval(values: Costs) -> Interval:
    """The median with its bootstrap interval; ends may be infinite, as observations are.

    So few start models can be drawn in few ways: all of them are gone through, each as often as it would be drawn.
    """
    of_start: dict[int, list[float]] = {}
    for seed, value in values.items():
        of_start.setdefault(seed % STARTS, []).append(value)
    medians: list[float] = []
    ways: list[int] = []
    for drawn in combinations_with_replacement(of_start, len(of_start)):
        medians.append(_median([value for start in drawn for value in of_start[start]]))
        ways.append(_orders(drawn))
    order = np.argsort(medians)
    share = np.cumsum(np.array(ways)[order]) / sum(ways)
    low, high = (float(np.array(medians)[order][np.searchsorted(share, end)]) for end in (0.025, 0.975))
    return Interval(_median([*values.values()]), low, high)


def _orders(drawn: Sequence[int]) -> int:
    """In how many orders these can be drawn."""
    return math.factorial(len(drawn)) // math.prod(math.factorial(drawn.count(start)) for start in {*drawn})


def _median(values: Sequence[float]) -> float:
    """Of an even number, the mean of the middle two: infinite if one is."""
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return low if low == high else (low + high) / 2


def less(arm: Sequence[Result], control: Sequence[Result], name: str) -> dict[int, float]:
    """How much more than the control an arm took to the target, in percent, on the seeds that both have.

    A control that never got there took at least all that it spent, and counts as that: it took more. An arm that never
    did is infinitely worse; where the control didn't either, what both spent is compared.
    """
    return _paired(arm, control, lambda mine, other: _relative(mine, other, name))


def points_less(arm: Sequence[Result], control: Sequence[Result], episodes: int) -> dict[int, float]:
    """Success of the first episodes, in points above the control's."""
    return _paired(
        arm, control, lambda mine, other: 100 * (mean_success(mine, episodes) - mean_success(other, episodes))
    )


def _paired(
    arm: Sequence[Result], control: Sequence[Result], difference: Callable[[Result, Result], float]
) -> dict[int, float]:
    other = {result["seed"]: result for result in control}
    return {mine["seed"]: difference(mine, other[mine["seed"]]) for mine in arm if mine["seed"] in other}


def _relative(mine: Result, other: Result, name: str) -> float:
    took, base = to_target(mine, name), to_target(other, name)
    if math.isinf(base):
        base = float(spent(other, name)[-1])
        took = min(took, float(spent(mine, name)[-1]))
    return 100.0 * (took - base) / base
