"""What docs/evidence.md shows: tables and plots of the results file, so that the page says what was measured."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks._replay_arms import ARMS, CONTENDERS, MAIN_TASKS, SETTINGS, TASKS, TUNING_SEEDS
from benchmarks._replay_figures import (
    Costs,
    Interval,
    costs,
    interval,
    less,
    mean_success,
    points_less,
    to_recent,
    to_target,
)
from benchmarks._replay_jobs import score
from benchmarks._replay_plots import intervals, mean_curves
from benchmarks._replay_runs import Result

FIRST = 2560
"""Fresh episodes whose success is told: half of the budget, in which tuned runs mostly get there."""
MEASURES: Mapping[str, Callable[[Result], float]] = {
    f"success of the first {FIRST:,}, %": lambda result: 100 * mean_success(result, FIRST),
    "fresh to 80 %": lambda result: to_recent(result, "fresh"),
    "fresh to 90 %": lambda result: to_target(result, "fresh"),
    "tool calls run": lambda result: to_target(result, "runs"),
    "CPU-s": lambda result: to_target(result, "cpu"),
    "wall, s": lambda result: to_target(result, "wall"),
}
"""Columns of a task's table; the last three are what it took to 90 %, too."""
BESIDE = {"fresh": "fresh to 90 %", "runs": "tool calls run", "cpu": "CPU-s", "wall": "wall"}
"""Columns of what an arm took less than another, in percent."""
COMPARED = (
    ("replay", "on_policy"),
    ("hindsight", "on_policy"),
    ("hindsight", "hindsight_last"),
    ("hindsight_last", "on_policy"),
    ("hindsight", "turn_credit"),
    ("hindsight", "short_first"),
    ("turn_credit", "on_policy"),
    ("short_first", "on_policy"),
    ("on_policy", "on_policy_rerun"),
    ("hindsight", "on_policy_rerun"),
)
"""Pairs of arms: the first less the second."""
_LEAST = 3
"""Fewer runs, or pairs of them, have no interval to speak of: they are in the results file alone."""
_PLOTTED = ("fresh to 90 %", "CPU-s")
_BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
Runs = Mapping[str, Sequence[Result]]
"""Results by arm."""


def tables(results: Sequence[Result]) -> dict[str, str]:
    """Every table of the page by its name, as markdown."""
    found = {"starts": starts_table(results), "tuned": tuned_table(results)}
    for task in TASKS:
        runs = several(results, task)
        found |= {task: costs_table(runs), f"{task}-beside": beside_table(runs)}
    return found


def plots(results: Sequence[Result]) -> dict[str, str]:
    """Every plot by the name of its file."""
    found = {}
    for task in MAIN_TASKS:
        runs, about = several(results, task), TASKS[task].title
        if not runs:
            continue
        titles = {arm: ARMS[arm].title for arm in runs}
        found[f"{task}-curves.svg"] = mean_curves(runs, titles, f"success over fresh episodes, {about}")
        panels = {name: {arm: costs(each, MEASURES[name]) for arm, each in runs.items()} for name in _PLOTTED}
        found[f"{task}-costs.svg"] = intervals(panels, titles, f"what it took to 90 %, {about}")
    return found


def runs_of(results: Sequence[Result], task: str) -> Runs:
    """All but tuning, of the arms that have runs on the task, in the order of ARMS."""
    of_task = [each for each in results if each["task"] == task and each["seed"] not in TUNING_SEEDS]
    there = {arm: [each for each in of_task if each["arm"] == arm] for arm in ARMS}
    return {arm: runs for arm, runs in there.items() if runs}


def several(results: Sequence[Result], task: str) -> Runs:
    return {arm: each for arm, each in runs_of(results, task).items() if len(each) >= _LEAST}


def starts_table(results: Sequence[Result]) -> str:
    """Success of the warmed-up models in all first iterations of the task's own; tuning has a model of its own."""
    results = [each for each in results if not ARMS[each["arm"]].short_first]
    models = {each["start"]: None for each in sorted(results, key=lambda each: each["seed"])}
    rows = []
    for task in MAIN_TASKS:
        shares = []
        for model in models:
            first = [each["iterations"][0] for each in results if (each["task"], each["start"]) == (task, model)]
            episodes = sum(row[0] for row in first)
            shares += [f"{sum(row[0] * row[2] for row in first) / episodes:.1%}".replace("%", " %")] if first else []
        if shares:
            rows.append([TASKS[task].title, ", ".join(shares)])
    return _markdown(["task", "success of each start model"], rows)


def tuned_table(results: Sequence[Result]) -> str:
    """The settings that were tried on all tuning seeds, the best first, with their median score."""
    rows = []
    for task in MAIN_TASKS:
        for contender in CONTENDERS:
            of_place = [each for each in results if (each["task"], each["arm"]) == (task, contender)]
            scores = {
                name: [score(each) for each in of_place if each["setting"] == name and each["seed"] in TUNING_SEEDS]
                for name in SETTINGS
            }
            final = {name: statistics.median(each) for name, each in scores.items() if len(each) == len(TUNING_SEEDS)}
            ordered = sorted(final, key=lambda name: final[name])
            if ordered:
                cells = [f"{name} ({final[name]:,.0f})" for name in ordered]
                rows.append([TASKS[task].title, ARMS[contender].title, *cells])
    return _markdown(["task", "contender", "found", "next"], rows)


def costs_table(runs: Runs) -> str:
    head = ["arm", "runs", "reached 90 %", *MEASURES]
    rows = []
    for arm, each in runs.items():
        found = [_told(interval(costs(each, measure))) for measure in MEASURES.values()]
        reached = sum(math.isfinite(to_target(result, "fresh")) for result in each)
        rows.append([ARMS[arm].title, str(len(each)), str(reached), *found])
    return _markdown(head, rows)


def beside_table(runs: Runs) -> str:
    """Differences on the same seeds: below 0, the first arm took less, or succeeded less."""
    rows = []
    for arm, control in COMPARED:
        if arm in runs and control in runs:
            points = points_less(runs[arm], runs[control], FIRST)
            found: list[Costs] = [points, *(less(runs[arm], runs[control], name) for name in BESIDE)]
            if len(points) >= _LEAST:
                told = [_told(interval(each), sign=True) for each in found]
                rows.append([ARMS[arm].title, ARMS[control].title, str(len(points)), *told])
    head = ["arm", "less", "pairs", "success of the first, points", *(f"{title}, %" for title in BESIDE.values())]
    return _markdown(head, rows)


def _told(found: Interval, *, sign: bool = False) -> str:
    return f"{_number(found.median, sign)} [{_number(found.low, sign)}, {_number(found.high, sign)}]"


def _number(value: float, sign: bool = False) -> str:
    if math.isinf(value):
        return "never"
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
