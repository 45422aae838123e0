"""Does replay pay, against a control that was tuned as well as it was?

`--run` makes the runs that the results lack, one JSON line each, by `agentloop train`; it can be stopped at any time.
`--report` writes the tables of docs/evidence.md and of docs/evidence. Without either: the medians of what was measured.
"""

import argparse
import json
import math
import sqlite3
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks import _pretrained_tables, _trained
from benchmarks._families import FAMILIES
from benchmarks._replay_figures import (
    MEASURES,
    STARTS,
    TARGET,
    Columns,
    Result,
    costs_table,
    differences_table,
    interval,
    markdown,
    to_target,
    with_tables,
)
from benchmarks._trained import ROOT, read, warmed_up

PAGES = (ROOT / "docs" / "evidence.md", *sorted((ROOT / "docs" / "evidence").glob("*.md")))
RESULTS = ROOT / "docs" / "evidence" / "results.jsonl"
CONFIG = "benchmarks/replay_value.yaml"
BUDGET = 5120
"""Fresh episodes after which a run that has not reached the target is over."""
SEEDS = range(10)
_CARELESS = {"hops": [2, 5], "p_next": 0.4, "p_stop": 0.4}
_FETCH = {
    "environment.name": f"{ROOT / 'examples' / 'fetch_place.py'}:FetchPlace",
    "warm_up.updates_after_target": 400,
    "rollout.max_tokens_per_turn": 64,  # twice what any right reply takes: an iteration waits for one that rambles
}
_CARELESS_FETCH = {"p_take": 0.3, "p_goal": 0.3, "p_put": 0.3}
_SPARSE = {"environment.options.hops": [3, 6], "warm_up.options": _CARELESS}
TASKS: Mapping[str, Mapping[str, Any]] = {
    "sparse": _SPARSE,
    "sparse_ten": _SPARSE,
    "very_sparse": {"environment.options.hops": [6, 8], "warm_up.options": _CARELESS},
    "fetch": _FETCH,
    "fetch_rare": {**_FETCH, "warm_up.options": _CARELESS_FETCH},
    "fetch_later": _FETCH,
    "sparse_50ms": _SPARSE,
    "very_sparse_50ms": {"environment.options.hops": [6, 8], "warm_up.options": _CARELESS},
}
"""Settings of each task; those that end in 50ms have tools that take so long, in ten as many start models. Before a
run that ends in later there was another one, with the same start model and other tasks."""
FOUND: Mapping[str, Mapping[str, tuple[int, int, float]]] = {
    "sparse": {"on_policy": (32, 2, 1.5e-3), "hindsight": (64, 4, 1.5e-3)},
    "very_sparse": {"on_policy": (32, 2, 0.7e-3), "hindsight": (32, 4, 0.7e-3)},
    "fetch": {"on_policy": (64, 4, 0.7e-3), "replay": (32, 4, 0.7e-3), "hindsight": (32, 1, 0.7e-3)},
    "fetch_rare": {"on_policy": (32, 2, 0.7e-3), "hindsight": (64, 4, 1.5e-3)},
}
"""Fresh episodes per iteration, epochs and learning rate that each contender was tuned to."""
_REPLAY = {"replay.fraction": 0.5, "replay.shortfall": "shrink"}
_REWARD = ROOT / "examples" / "fetch_elsewhere.py"
# They end at 2,560 fresh episodes.
_REVERSED = {"environment.name": f"{_REWARD}:Elsewhere", "run.iterations": 80, "run.schedule_iterations": 160}
_HINDSIGHT = {
    **_REPLAY,
    "replay.sources": {"hindsight": 1.0},
    "replay.sampler": "uniform",
    "replay.hindsight.enable": True,
}
ARMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "on_policy": ("on_policy", {}),
    "replay": ("replay", _REPLAY),
    "hindsight": ("hindsight", _HINDSIGHT),
    "hindsight_last": ("hindsight", {**_HINDSIGHT, "replay.hindsight.window": 1}),
    "on_policy_rerun": ("on_policy", {"rollout.replay_observations": False}),
    "replay_earlier": ("replay", _REPLAY),
    "reversed": ("replay", {**_REPLAY, **_REVERSED}),
    "reversed_earlier": ("replay", {**_REPLAY, **_REVERSED}),
}
"""Whose tuned settings an arm has, and its own."""
TITLES = {
    "on_policy": "on-policy, tuned",
    "replay": "plain replay",
    "hindsight": "hindsight, of 8 iterations",
    "hindsight_whole": "hindsight, small batches at the whole rate",
    "hindsight_last": "hindsight, of the last iteration",
    "restarts": "half of the groups inside stored successes",
    "state_values": "on-policy, with state values",
    "short_first": "on-policy, short tasks first",
    "on_policy_rerun": "on-policy, every call run",
    "replay_earlier": "plain replay, with the rows of an earlier run",
    "reversed": "reversed reward: the earlier policy alone",
    "reversed_earlier": "reversed reward: its rows too",
}
PAIRS = (
    ("replay", "on_policy"),
    ("hindsight", "on_policy"),
    ("hindsight_whole", "on_policy"),
    ("hindsight", "hindsight_whole"),
    ("hindsight", "hindsight_last"),
    ("hindsight_last", "on_policy"),
    ("restarts", "on_policy"),
    ("state_values", "on_policy"),
    ("hindsight", "short_first"),
    ("short_first", "on_policy"),
    ("on_policy", "on_policy_rerun"),
    ("hindsight", "on_policy_rerun"),
    ("replay_earlier", "replay"),
    ("reversed_earlier", "reversed"),
)
_METRICS = ("batch/fresh", "batch/replay", "rollout/success", "tools/runs", "time/iteration")


def _of(task: str) -> str:
    """The task whose settings were found for this one."""
    return task.removesuffix("_50ms").removesuffix("_ten").removesuffix("_later")


def starts(task: str) -> int:
    return 10 if task.endswith("_ten") else STARTS


def measures(task: str) -> dict[str, str]:
    """Seconds of runs at whose time other programs ran are no figures."""
    left_out = ("cpu", "wall") if task in ("sparse_ten", "fetch_later") else ()
    return {title: name for title, name in MEASURES.items() if name not in left_out}


def settings(task: str, arm: str) -> dict[str, Any]:
    """Of a run's configuration. Replayed rows come on top of the fresh ones, in as many optimizer steps."""
    contender, own = ARMS[arm]
    fresh, epochs, rate = FOUND[_of(task)][contender]
    rows = 2 * fresh if "replay.fraction" in own else fresh
    return {
        **TASKS[task],
        **({"environment.options.delay_s": 0.05} if task.endswith("_50ms") else {}),
        "batch.trajectories": rows,
        "batch.mini_batch": rows,
        "batch.ppo_epochs": epochs,
        "optimizer.learning_rate": rate,
        "run.iterations": math.ceil(BUDGET / fresh),
        "run.stop_at_success": TARGET,
        "evaluation.every": max(1, 128 // fresh),
        **own,
    }


def earlier_run(start: Path, number: int, folder: Path) -> Path:
    """A run with plain replay, and with other tasks than all that are compared."""
    found = folder / f"earlier-{number}"
    if not found.exists():
        place = {"run.seed": 1000 + number, "run.folder": str(folder / "runs"), "model.path": str(start)}
        result, _ = _trained.run("train", CONFIG, {**settings("fetch", "replay"), **place})
        Path(result["folder"]).rename(found)
        rows, rewarded = found / "rows.jsonl", found / "rewarded.jsonl"
        _trained.typed("agentloop", "replay", "export", found, rows, folder=ROOT)
        _trained.typed("examples.changed_reward", rows, rewarded, f"{_REWARD}:elsewhere", folder=ROOT)
    return found


def of_earlier_run(earlier: Path, arm: str) -> dict[str, Any]:
    """What a run has of an earlier one: its rows, its policy, or both."""
    policy = {"model.path": str(earlier / "model")} if arm.startswith("reversed") else {}
    rows = {"replay_earlier": earlier, "reversed_earlier": earlier / "rewarded.jsonl"}
    return {**policy, **({"replay.attach": {"earlier": str(rows[arm])}} if arm in rows else {})}


def run(task: str, arm: str, seed: int, folder: Path) -> Result:
    """One run to the target, or to the end of the budget; seeds that are equal modulo `starts` begin with one model."""
    number = seed % starts(task)
    start = folder / f"{_of(task)}-{number}"
    if not start.exists():
        warmed_up(CONFIG, {**TASKS[task], "run.seed": number, "run.folder": str(folder / "warm-up")}).rename(start)
    place: dict[str, Any] = {"run.seed": seed, "run.folder": str(folder / "runs"), "model.path": str(start)}
    if task.endswith("_later"):
        place |= of_earlier_run(earlier_run(start, number, folder), arm)
    made, cpu = _trained.run("train", CONFIG, {**settings(task, arm), **place})
    with closing(sqlite3.connect(Path(made["folder"]) / "replay.sqlite")) as database:
        asked = "select iteration, value from metrics where name = ? and iteration > 0 order by iteration"
        columns = [dict(database.execute(asked, (name,))) for name in _METRICS]
        evaluations = database.execute(asked, ("eval/success",)).fetchall()
    wall = sum(columns[-1].values())
    rows = [[column.get(number, 0.0) for column in columns] for number in columns[0]]
    # The command's CPU-seconds, shared out by wall-clock: what each iteration took is not on record.
    iterations = [[*row[:4], round(cpu * row[4] / wall, 3), round(row[4], 3)] for row in rows]
    of_run = {"task": task, "arm": arm, "seed": seed, "commit": _trained.commit()}
    return {**of_run, "iterations": iterations, "evaluations": evaluations}


def by_arm(results: Sequence[Result], task: str) -> dict[str, list[Result]]:
    """Runs that were not made to tune, of arms that have several, in the order of TITLES."""
    of_task = [each for each in results if each["task"] == task and each["seed"] in SEEDS]
    found = {arm: [each for each in of_task if each["arm"] == arm] for arm in TITLES}
    return {arm: runs for arm, runs in found.items() if len(runs) >= 3}


def tables(results: Sequence[Result]) -> dict[str, str]:
    """Those of the pages, by name."""
    found = dict(chain.from_iterable(_pretrained_tables.tables(family).items() for family in FAMILIES))
    for task in TASKS:
        runs, columns = by_arm(results, task), Columns(measures(task), starts=starts(task))
        against = differences_table(runs, TITLES, PAIRS, columns)
        found |= {task: costs_table(runs, TITLES, columns), f"{task}-against": against}
    return {**found, "fetch_later-reversed": courses_table(results, ("reversed", "reversed_earlier"))}


def courses_table(results: Sequence[Result], arms: Sequence[str]) -> str:
    """Held-out success of each run by fresh episodes, of which an iteration has 32."""
    runs = sorted((each for each in results if each["arm"] in arms), key=lambda each: (each["seed"], each["arm"]))
    courses = [dict(each["evaluations"]) for each in runs]
    head = ["fresh episodes", *(f"seed {each['seed']}, {TITLES[each['arm']]}, %" for each in runs)]
    shown = (4, 8, 12, 16, 20, 24, 32, 48, 80)
    rows = [[f"{32 * last:,}", *(f"{100 * course[last]:.1f}" for course in courses)] for last in shown]
    return markdown(head, rows)


def main(arguments: Sequence[str] = ()) -> dict[str, float]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay_value", description=__doc__)
    parser.add_argument("--run", action="store_true", help="the runs that the results lack: hours")
    parser.add_argument("--report", action="store_true", help="the tables of docs/evidence.md and docs/evidence")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(FOUND))
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=["on_policy", "hindsight", "hindsight_last"])
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    given = parser.parse_args(arguments)
    made = {(each["task"], each["arm"], each["seed"]) for each in read(RESULTS)}
    wanted = [(task, arm, seed) for seed in given.seeds for task in given.tasks for arm in given.arms]
    with tempfile.TemporaryDirectory() as folder:
        for task, arm, seed in wanted if given.run else ():
            if (task, arm, seed) not in made:
                result = run(task, arm, seed, Path(folder))
                with RESULTS.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                print(f"{task} {arm} seed {seed}: fresh to 90 %: {to_target(result, 'fresh'):,.0f}", flush=True)
    results = read(RESULTS)
    if given.report:
        found = tables(results)
        for page in PAGES:
            page.write_text(with_tables(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    return {
        f"{task}_{arm}_fresh": interval({each["seed"]: to_target(each, "fresh") for each in runs}).median
        for task in TASKS
        for arm, runs in by_arm(results, task).items()
    }


if __name__ == "__main__":
    for name, value in main(sys.argv[1:]).items():
        print(f"{name:<40} {value:10,.0f}")
