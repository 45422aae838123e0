"""What the runs of an arm took to the target: medians over seeds, and differences from another arm, seed by seed.

A run that did not get there took longer than anybody knows: it counts as infinitely long, which medians bear and means
would not. Intervals are the middle 95 % of a bootstrap (Efron 1979) over start models, each with all seeds that begin
with it: what such seeds have in common is no evidence twice.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import combinations_with_replacement, pairwise
from typing import Any, NamedTuple

import numpy as np

TARGET, FIRST, STARTS = 0.9, 2560, 5
"""Held-out success to reach in two evaluations in a row; first fresh episodes whose success is shown; start models."""
ITERATION = ("fresh", "replayed", "success", "runs", "cpu", "wall")
"""What a result has of each iteration: rows of either stream; success of the fresh ones, how many of their tool
calls were run; CPU-seconds and seconds."""
Result = Mapping[str, Any]
Costs = Mapping[int, float]
"""By seed; infinite where the target was not reached."""
MEASURES: Mapping[str, str] = {"fresh to 90 %": "fresh", "tool calls run": "runs", "CPU-s": "cpu", "wall, s": "wall"}
_LEAST = 3
"""Fewer runs, or pairs of them, have no interval to speak of."""
_BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


class Interval(NamedTuple):
    median: float
    low: float
    high: float


def _column(result: Result, name: str) -> np.ndarray:
    """`name` may be a sum of columns."""
    places = [result.get("columns", ITERATION).index(part) for part in name.split("+")]
    return np.array([sum(row[place] for place in places) for row in result["iterations"]], np.float64)


def total(result: Result, name: str) -> float:
    """Of the whole run."""
    return float(_column(result, name).sum())


def to_target(result: Result, name: str) -> float:
    """What it had taken by the first evaluation of the first two in a row that both reached the target; by the
    iteration that reached it where a result says which that was."""
    if "reached" in result:
        return math.inf if result["reached"] is None else float(_column(result, name)[: result["reached"]].sum())
    for (iteration, success), (_, following) in pairwise(result["evaluations"]):
        if min(success, following) >= TARGET:
            return float(_column(result, name)[:iteration].sum())
    return math.inf


def mean_success(result: Result, episodes: int = FIRST) -> float:
    """Of the first so many fresh episodes; those after the end of a run succeed as its last two evaluations did."""
    each = np.repeat(_column(result, "success"), _column(result, "fresh").astype(int))[:episodes]
    if len(each) == episodes:
        return float(each.mean())
    last = float(np.mean([success for _, success in result["evaluations"][-2:]]))
    return float(each.sum() + (episodes - len(each)) * last) / episodes


def interval(values: Costs, starts: int = STARTS) -> Interval:
    """The median with its bootstrap interval; ends may be infinite, as observations are.

    A few start models can be drawn in few ways: all of them are gone through, each as often as it would be drawn.
    """
    of_start: dict[int, list[float]] = {}
    for seed, value in values.items():
        of_start.setdefault(seed % starts, []).append(value)
    each = np.full((len(of_start), max(map(len, of_start.values()))), math.nan)
    for row, found in zip(each, of_start.values(), strict=True):
        row[: len(found)] = found
    drawn, ways = _draws(len(of_start))
    medians = np.nanmedian(each[drawn].reshape(len(drawn), -1), axis=1)
    order = np.argsort(medians)
    share = np.cumsum(ways[order]) / ways.sum()
    low, high = (float(medians[order][np.searchsorted(share, end)]) for end in (0.025, 0.975))
    return Interval(float(np.median([*values.values()])), low, high)


@cache
def _draws(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Every way to draw as many of so many, with replacement, and how often each is drawn."""
    drawn = list(combinations_with_replacement(range(count), count))
    repeats = (math.prod(map(math.factorial, Counter(each).values())) for each in drawn)
    return np.array(drawn), np.array([math.factorial(count) // each for each in repeats])


def less(arm: Sequence[Result], control: Sequence[Result], difference: Callable[[Result, Result], float]) -> Costs:
    """Differences on the seeds that both have."""
    other = {result["seed"]: result for result in control}
    return {mine["seed"]: difference(mine, other[mine["seed"]]) for mine in arm if mine["seed"] in other}


def percent_more(mine: Result, other: Result, name: str) -> float:
    """How much more than the control an arm took to the target, in percent.

    A control that never got there counts as all that it spent: it took more. An arm that never did is infinitely worse;
    where the control didn't either, what both spent is compared.
    """
    took, base = to_target(mine, name), to_target(other, name)
    if math.isinf(base):
        base = total(other, name)
        took = min(took, total(mine, name))
    return 100.0 * (took - base) / base


class Columns(NamedTuple):
    """What tables show of each result."""

    measures: Mapping[str, str] = MEASURES
    """By title, what it took to the target."""
    successes: Mapping[str, Callable[[Result], float]] = {f"success of the first {FIRST:,}": mean_success}
    starts: int = STARTS


def costs_table(runs: Mapping[str, Sequence[Result]], titles: Mapping[str, str], columns: Columns) -> str:
    rows, measures = [], columns.measures
    for arm, each in runs.items():
        shares = [{result["seed"]: 100 * of(result) for result in each} for of in columns.successes.values()]
        measured = [{result["seed"]: to_target(result, name) for result in each} for name in measures.values()]
        finite = sum(math.isfinite(cost) for cost in measured[0].values())
        cells = [_text(interval(costs, columns.starts)) for costs in (*shares, *measured)]
        slowest = _number(max(measured[0].values()), sign=False)
        rows.append([titles[arm], str(len(each)), str(finite), *cells, slowest])
    target = next(iter(measures)).removeprefix("fresh to ")
    successes = [f"{title}, %" for title in columns.successes]
    head = ["arm", "runs", f"reached {target}", *successes, *measures, "slowest seed, fresh"]
    return markdown(head, rows)


def differences_table(
    runs: Mapping[str, Sequence[Result]],
    titles: Mapping[str, str],
    pairs: Sequence[tuple[str, str]],
    columns: Columns,
) -> str:
    """Differences on the same seeds: below 0, the first arm took less, or succeeded less."""
    rows = []
    for arm, control in pairs:
        if arm in runs and control in runs:
            ways = [partial(_points_more, of=of) for of in columns.successes.values()]
            ways += [partial(percent_more, name=name) for name in columns.measures.values()]
            found = [less(runs[arm], runs[control], way) for way in ways]
            if len(found[0]) >= _LEAST:
                cells = [_text(interval(each, columns.starts), sign=True) for each in found]
                rows.append([titles[arm], titles[control], str(len(found[0])), *cells])
    successes = [f"{title.removesuffix(f' {FIRST:,}')}, points" for title in columns.successes]
    measures = [f"{title.removesuffix(', s')}, %" for title in columns.measures]
    return markdown(["arm", "minus", "pairs", *successes, *measures], rows)


def _points_more(mine: Result, other: Result, of: Callable[[Result], float]) -> float:
    return 100 * (of(mine) - of(other))


def _text(found: Interval, *, sign: bool = False) -> str:
    median, low, high = (_number(value, sign) for value in found)
    return median if low == high else f"{median} [{low}, {high}]"


def _number(value: float, sign: bool) -> str:
    if math.isinf(value):
        return "never"
    plus = "+" if sign else ""
    return f"{value:{plus},.0f}" if abs(value) >= 100 else f"{value:{plus}.3g}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(line)} |\n" for line in [head, *rows])
    return "".join([first, "|" + "---|" * len(head) + "\n", *others])


def with_tables(page: str, found: Mapping[str, str]) -> str:
    """The page with its tables made again. A table that is not known is an error: nobody would have measured it."""
    return _BLOCK.sub(lambda match: f"{match[1]}{found[match[2]]}{match[3]}", page)
