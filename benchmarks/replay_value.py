"""Does replay pay, against controls that are tuned as well as it is?

`--run` makes the runs that the results lack, one JSON line each: first those that tune each contender on each task,
then all arms on all seeds with what was found. It can be stopped at any time, and several processes share the work.
`--report` writes the tables and plots of docs/evidence.md; `--quick` makes one short run, to try the whole way.
Without any of them: the medians of what has been measured.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks._replay_arms import ARMS, BUDGET, MAIN_TASKS, SEEDS, TASKS, TUNING_BUDGET, TUNING_SEEDS, Job, Key
from benchmarks._replay_figures import costs, interval, to_target
from benchmarks._replay_jobs import jobs
from benchmarks._replay_report import runs_of, write
from benchmarks._replay_runs import ROOT, Result, add_result, play, read_results

PAGE = ROOT / "docs" / "evidence.md"
PLOTS = ROOT / "docs" / "evidence"
RESULTS = PLOTS / "results.jsonl"
WORK = ROOT / "runs" / "replay_value"
_LOOK_AGAIN_S = 5.0
_QUICK = Job("dense", "hindsight", "32x1@0.0015", TUNING_SEEDS[0])
_QUICK_BUDGET = 256


def by_key(results: Sequence[Result]) -> dict[Key, Result]:
    return {(each["task"], each["arm"], each["setting"], each["seed"]): each for each in results}


def run(tasks: Sequence[str], arms: Sequence[str], seeds: Sequence[int], *, results: Path, work: Path) -> None:
    """What is missing, until nothing is."""
    (work / "locks").mkdir(parents=True, exist_ok=True)
    while ready := jobs(tasks, arms, seeds, by_key(read_results(results))):
        if not any(_make(job, results, work) for job in ready):
            time.sleep(_LOOK_AGAIN_S)  # others are at all of them


def _make(job: Job, results: Path, work: Path) -> bool:
    """False where another process is at it."""
    with (work / "locks" / "-".join(map(str, job.key))).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if job.key in by_key(read_results(results)):
            return True
        budget = TUNING_BUDGET if job.seed in TUNING_SEEDS else BUDGET
        result = play(job, work, budget=budget)
        add_result(results, {**vars(job), **result})
        print(line(job, result), flush=True)
    return True


def line(job: Job, result: Result) -> str:
    fresh, _, _, runs, cpu, wall = (sum(column) for column in zip(*result["iterations"], strict=True))
    success = ", ".join(f"{success:.1%}" for _, success in result["evaluations"][-2:])
    return (
        f"{job.task} {job.arm} {job.setting} seed {job.seed}: {success} after {fresh} fresh, {runs} calls "
        f"run, {cpu:.0f} CPU-s, {wall:.0f} s"
    )


def quick() -> None:
    """The whole way of a run, small: a warm-up, and a few iterations with hindsight."""
    with tempfile.TemporaryDirectory() as folder:
        print(line(_QUICK, play(_QUICK, Path(folder), budget=_QUICK_BUDGET)))


def figures(results: Sequence[Result]) -> dict[str, float]:
    """Median fresh episodes and CPU-seconds to the target; infinite where most seeds did not get there."""
    return {
        f"{task}_{arm}_{name}": interval(costs(each, partial(to_target, name=name))).median
        for task in TASKS
        for arm, each in runs_of(results, task).items()
        for name in ("fresh", "cpu")
    }


def main(arguments: Sequence[str] = ()) -> dict[str, float]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay_value", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short run")
    parser.add_argument("--run", action="store_true", help="the runs that the results lack: hours")
    parser.add_argument("--report", action="store_true", help="tables and plots of docs/evidence.md")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(MAIN_TASKS))
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=WORK, help="for warmed-up models and runs in progress")
    given = parser.parse_args(arguments)
    if given.quick:
        quick()
        return {}
    if given.run:
        with suppress(KeyboardInterrupt):
            run(given.tasks, given.arms, given.seeds, results=given.results, work=given.work)
    results = read_results(given.results)
    if given.report:
        write(results, PAGE, PLOTS)
    return figures(results)


if __name__ == "__main__":
    for name, value in main(sys.argv[1:]).items():
        print(f"{name:<40} {value:10,.0f}")
