"""What docs/evidence.md shows: tables and plots of the results file, so that the page says what was measured."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks._replay_arms import ARMS, SEEDS, TASKS, WAIT_S
from benchmarks._replay_figures import (
    Interval,
    beside,
    costs,
    courses,
    interval,
    mean_success,
    spent,
    to_recent,
    to_target,
)
from benchmarks._replay_plots import intervals, mean_curves
from benchmarks._replay_runs import Result

MEASURES: Mapping[str, Callable[[Result], float]] = {
    "success of the first 2,560, %": lambda result: 100 * mean_success(result, 2560),
    "fresh to 80 %": lambda result: to_recent(result, "fresh"),
    "fresh to 90 %": lambda result: to_target(result, "fresh"),
    "... at once": lambda result: to_target(result, "fresh", in_a_row=1),
    "CPU-s to 90 %": lambda result: to_target(result, "cpu"),
    "with slow tools, s": lambda result: to_target(result, "waited"),
}
"""Columns of the tables."""
_TOGETHER = {"dense": ("dense",), "sparse": ("sparse",), "both": ("dense", "sparse")}
CONTROLS = {
    "dense": ("half_batch", "on_policy"),
    "sparse": ("half_batch", "on_policy"),
    "both": ("half_batch", "half_epochs"),
}
"""What the arms are paired with, seed by seed."""
_LEAST = 3
"""Fewer runs, or pairs of them, have no interval to speak of: they are in the results file alone."""
_PLOTTED = ("fresh to 90 %", "CPU-s to 90 %")
_BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
Runs = Mapping[str, Sequence[Result]]
"""Results by arm."""


def tables(results: Sequence[Result]) -> dict[str, str]:
    """Every table of the page by its name, as markdown."""
    found = {"starts": starts_table(results), "ess": ess_table(results)}
    for name, tasks in _TOGETHER.items():
        runs = {
            arm: each
            for arm, each in _several(by_arm(results, tasks, SEEDS)).items()
            if {result["task"] for result in each} == {*tasks}
        }
        found |= {name: costs_table(runs)} if len(tasks) == 1 and runs else {}
        for control in CONTROLS[name]:
            found |= {f"{name}-beside-{control}": beside_table(runs, control)} if control in runs else {}
    slow = [result for result in results if result["task"] == "slow"]
    return found | ({"slow": slow_table(slow, results)} if slow else {})


def plots(results: Sequence[Result]) -> dict[str, str]:
    """Every plot by the name of its file."""
    found = {}
    for task in ("dense", "sparse"):
        runs, about = _several(by_arm(results, [task], SEEDS)), TASKS[task].title
        if not runs:
            continue
        titles = {arm: ARMS[arm].title for arm in runs}
        found[f"{task}-curves.svg"] = mean_curves(runs, titles, f"success over fresh episodes, {about}")
        panels = {
            name: {arm: [*costs(each, MEASURES[name]).values()] for arm, each in runs.items()} for name in _PLOTTED
        }
        found[f"{task}-costs.svg"] = intervals(panels, titles, f"what it took, {about}")
    return found


def by_arm(results: Sequence[Result], tasks: Sequence[str], seeds: Sequence[int]) -> Runs:
    """Those that have runs on these tasks and seeds, in the order of ARMS."""
    there = {arm: [r for r in results if r["task"] in tasks and r["arm"] == arm and r["seed"] in seeds] for arm in ARMS}
    return {arm: runs for arm, runs in there.items() if runs}


def _several(runs: Runs) -> Runs:
    return {arm: each for arm, each in runs.items() if len(each) >= _LEAST}


def starts_table(results: Sequence[Result]) -> str:
    """Success of the warmed-up models, of all episodes that a run's first iteration collected."""
    rows = []
    for task in ("dense", "sparse"):
        first = [(r["seed"], r["iterations"][0]) for r in results if r["task"] == task and r["seed"] in SEEDS]
        cells = []
        for seed in SEEDS:
            fresh = [(row[0], row[2]) for of, row in first if of == seed]
            episodes = sum(count for count, _ in fresh)
            cells.append(f"{sum(count * success for count, success in fresh) / episodes:.1%}" if fresh else "-")
        rows.append([TASKS[task].title, *(cell.replace("%", " %") for cell in cells)])
    return _markdown(["task", *(f"seed {seed}" for seed in SEEDS)], rows)


def ess_table(results: Sequence[Result]) -> str:
    """How far replay got from on-policy, and what the controller made of it."""
    rows = []
    for task in TASKS:
        for arm, runs in by_arm(results, [task], SEEDS).items():
            by_age = [result["least_ess_by_age"] for result in runs if "least_ess_by_age" in result]
            if "replay.fraction" in ARMS[arm].settings and by_age:
                factor = min(result["least_factor"] for result in runs)
                told = f"{factor:.2f}" if "replay.controller" in ARMS[arm].settings else "no controller"
                rows.append([task, ARMS[arm].title, str(len(by_age)), f"{min(by_age):.3f}", told])
    return _markdown(["task", "arm", "runs", "least ESS of an age bucket", "controller's least factor"], rows)


def slow_table(slow: Sequence[Result], results: Sequence[Result]) -> str:
    """Runs whose tool did wait, beside what the same run of the dense task and its tool calls let expect."""
    head = ["run", "course", "tool calls", "waited for them, s", "CPU-s", "wall, s", "expected, s"]
    rows = []
    for result in slow:
        key = (result["arm"], result["seed"])
        (dense,) = [r for r in results if r["task"] == "dense" and (r["arm"], r["seed"]) == key]
        same = courses(dense) == courses(result)
        calls, cpu, wall, expected = (
            spent(each, name)[-1]
            for each, name in ((result, "calls"), (result, "cpu"), (result, "wall"), (dense, "waited"))
        )
        rows.append(
            [
                f"{ARMS[key[0]].title}, seed {key[1]}",
                "the dense run's, to every figure" if same else "another than the dense run's",
                f"{calls:,.0f}",
                f"{WAIT_S * calls:,.0f}",
                *(f"{seconds:,.0f}" for seconds in (cpu, wall, expected)),
            ]
        )
    return _markdown(head, rows)


def costs_table(runs: Runs) -> str:
    head = ["arm", "runs", "reached 90 %", *MEASURES]
    rows = []
    for arm, each in runs.items():
        found = [_told(interval([*costs(each, measure).values()])) for measure in MEASURES.values()]
        rows.append([ARMS[arm].title, str(len(each)), str(_reached(each)), *found])
    return _markdown(head, rows)


def beside_table(runs: Runs, control: str) -> str:
    """Differences to the control on the same seeds: below 0, the arm took less, or succeeded less."""
    rows = []
    for arm, each in runs.items():
        pairs = len({(r["task"], r["seed"]) for r in each} & {(r["task"], r["seed"]) for r in runs[control]})
        if arm == control or pairs < _LEAST:
            continue
        found = [beside(costs(runs[control], measure), costs(each, measure)) for measure in MEASURES.values()]
        rows.append([ARMS[arm].title, str(pairs), *(_told(each, sign=True) for each in found)])
    return _markdown([f"arm, less {ARMS[control].title}", "pairs", *MEASURES], rows)


def _reached(runs: Sequence[Result]) -> int:
    return sum(math.isfinite(to_target(result, "fresh")) for result in runs)


def _told(found: Interval | None, *, sign: bool = False) -> str:
    if found is None:
        return "-"
    return f"{_number(found.median, sign)} [{_number(found.low, sign)}, {_number(found.high, sign)}]"


def _number(value: float, sign: bool = False) -> str:
    if math.isinf(value):
        return "never" if value > 0 else "always"
    plus = "+" if sign else ""
    return f"{value:{plus},.0f}" if abs(value) >= 100 else f"{value:{plus}.3g}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_tables(page: str, found: Mapping[str, str]) -> str:
    """The page with its tables made anew. A table that is not known is an error: it would say what nobody measured."""
    return _BLOCK.sub(lambda match: f"{match[1]}{found[match[2]]}{match[3]}", page)


def write(results: Sequence[Result], page: Path, folder: Path) -> None:
    page.write_text(with_tables(page.read_text(encoding="utf-8"), tables(results)), encoding="utf-8")
    for name, drawn in plots(results).items():
        (folder / name).write_text(drawn, encoding="utf-8")
