"""Does replay pay? Fresh episodes and CPU-seconds to 90 % held-out success, with replay and without.

`--run` makes the runs that the results file lacks, one JSON line each, and can be stopped at any time; `--report`
writes the tables and plots of docs/evidence.md from that file; `--quick` trains one pair of arms for a few iterations.
Without any of them: the medians of what has been measured.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks._replay_arms import ARMS, SEEDS, TASKS
from benchmarks._replay_figures import costs, interval, to_target
from benchmarks._replay_report import by_arm, write
from benchmarks._replay_runs import ROOT, Result, add_result, read_results, run_arm

PAGE = ROOT / "docs" / "evidence.md"
PLOTS = ROOT / "docs" / "evidence"
RESULTS = PLOTS / "results.jsonl"
WORK = ROOT / "runs" / "replay_value"
_QUICK = {"tasks": ["dense"], "arms": ["half_batch", "replay_50_success"], "seeds": [0]}
_QUICK_BUDGET = 256


def run(
    tasks: Sequence[str], arms: Sequence[str], seeds: Iterable[int], *, results: Path, work: Path, budget: int | None
) -> None:
    """What is missing, one seed of all arms after another. Several processes share the work, a lock per run."""
    (work / "locks").mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for task in tasks:
            for arm in arms:
                with (work / "locks" / f"{task}-{arm}-{seed}").open("w") as lock:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue  # another process is at it
                    if any((r["task"], r["arm"], r["seed"]) == (task, arm, seed) for r in read_results(results)):
                        continue
                    result = {"arm": arm, **run_arm(task, ARMS[arm].settings, seed, work, budget=budget)}
                    add_result(results, result)
                    print(told(result), flush=True)


def told(result: Result) -> str:
    iterations = result["iterations"]
    fresh, _, _, _, cpu, wall = (sum(column) for column in zip(*iterations, strict=True))
    success = ", ".join(f"{success:.1%}" for _, success in result["evaluations"])
    return (
        f"{result['task']} {result['arm']} seed {result['seed']}: {success} after {len(iterations)} iterations, "
        f"{fresh} fresh, {cpu:.1f} CPU-s, {wall:.1f} s, least ESS {result['least_ess_by_age']}"
    )


def figures(results: Sequence[Result]) -> dict[str, float]:
    """Median fresh episodes and CPU-seconds to the target, of the arms that most seeds reached it with."""
    found = {}
    for task in TASKS:
        for arm, runs in by_arm(results, [task], SEEDS).items():
            for name in ("fresh", "cpu"):
                median = interval([*costs(runs, lambda result, name=name: to_target(result, name)).values()]).median
                found |= {f"{task}_{arm}_{name}": median} if median < math.inf else {}
    return found


def quick() -> None:
    """The whole way of a run, small: a warm-up, and a few iterations without and with replay."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        run(**_QUICK, results=results, work=Path(folder), budget=_QUICK_BUDGET)


def main(arguments: Sequence[str] = ()) -> dict[str, float]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay_value", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one pair of arms, for a few iterations")
    parser.add_argument("--run", action="store_true", help="the runs that the results lack: hours")
    parser.add_argument("--report", action="store_true", help="tables and plots of docs/evidence.md")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=["dense", "sparse"])
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=WORK, help="for warmed-up models and runs in progress")
    given = parser.parse_args(arguments)
    if given.quick:
        quick()
        return {}
    if given.run:
        run(given.tasks, given.arms, given.seeds, results=given.results, work=given.work, budget=None)
    results = read_results(given.results)
    if given.report:
        write(results, PAGE, PLOTS)
    return figures(results)


if __name__ == "__main__":
    for name, value in main(sys.argv[1:]).items():
        print(f"{name:<40} {value:10,.0f}")
