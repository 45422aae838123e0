"""Does replay pay, against controls that are tuned as well as it is?

`--run` makes the runs that the results lack, one JSON line each: first those that tune each contender on each task,
then all arms on all seeds with what was found. It can be stopped at any time, and several processes share the work.
Without it: what has been measured.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks._replay_runs import ROOT, add_result, read_results
from benchmarks._study_arms import (
    ARMS,
    BUDGET,
    CONTENDERS,
    KEPT,
    SEEDS,
    SETTINGS,
    TARGET,
    TASKS,
    TUNING_BUDGET,
    TUNING_SEEDS,
    Values,
)
from benchmarks._study_runs import Outcome, play

RESULTS = ROOT / "docs" / "evidence" / "study.jsonl"
WORK = ROOT / "runs" / "replay_study"
_LOOK_AGAIN_S = 5.0


@dataclass(frozen=True)
class Job:
    """A run to make; `arm` is a contender's name while it is tuned."""

    task: str
    arm: str
    setting: str
    seed: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.task, self.arm, self.setting, self.seed

    @property
    def values(self) -> Values:
        if self.seed in TUNING_SEEDS:
            return CONTENDERS[self.arm](SETTINGS[self.setting])
        arm = ARMS[self.arm]
        return {**CONTENDERS[arm.contender](SETTINGS[self.setting]), **arm.values}


Outcomes = dict[tuple[str, str, str, int], Outcome]


def score(outcome: Outcome) -> float:
    """Fresh episodes to the target; beyond the budget by what was missing, where it was not reached."""
    fresh = [sum(row[0] for row in outcome["iterations"][:number]) for number, _ in outcome["evaluations"]]
    if len(fresh) > 1 and min(success for _, success in outcome["evaluations"][-2:]) >= TARGET:
        return fresh[-2]
    successes = sum(row[0] * row[2] for row in outcome["iterations"])
    return 2 * BUDGET - successes


def tuning(task: str, contender: str, found: Outcomes) -> Iterator[Job]:
    """Runs that are still to be made, as far as they are known: the next seed is for the best settings so far."""
    settings = list(SETTINGS)
    for seed, kept in zip(TUNING_SEEDS, KEPT, strict=True):
        settings = _best(task, contender, settings, found)[:kept]
        missing = [job for name in settings if (job := Job(task, contender, name, seed)).key not in found]
        if missing:
            yield from missing
            return


def _best(task: str, contender: str, settings: Sequence[str], found: Outcomes) -> list[str]:
    """By the median over the seeds that each was tried on."""

    def median(name: str) -> float:
        keys = [(task, contender, name, seed) for seed in TUNING_SEEDS]
        return statistics.median([score(found[key]) for key in keys if key in found] or [math.inf])

    return sorted(settings, key=median)


def tuned(task: str, contender: str, found: Outcomes) -> str | None:
    """The setting that was found; None before."""
    if any(tuning(task, contender, found)):
        return None
    last = [name for name in SETTINGS if (task, contender, name, TUNING_SEEDS[-1]) in found]
    return _best(task, contender, last, found)[0]


def jobs(tasks: Sequence[str], arms: Sequence[str], seeds: Sequence[int], found: Outcomes) -> list[Job]:
    """All that can be begun now."""
    contenders = {ARMS[arm].contender: None for arm in arms}
    ready = [job for task in tasks for contender in contenders for job in tuning(task, contender, found)]
    settings = {(task, contender): tuned(task, contender, found) for task in tasks for contender in contenders}
    for seed in seeds:
        for task in tasks:
            for arm in arms:
                setting = settings[task, ARMS[arm].contender]
                if setting is not None and (task, arm, setting, seed) not in found:
                    ready.append(Job(task, arm, setting, seed))
    return ready


def outcomes(path: Path) -> Outcomes:
    return {(o["task"], o["arm"], o["setting"], o["seed"]): o for o in read_results(path)}


def run(tasks: Sequence[str], arms: Sequence[str], seeds: Sequence[int], *, results: Path, work: Path) -> None:
    """What is missing, until nothing is."""
    (work / "locks").mkdir(parents=True, exist_ok=True)
    while ready := jobs(tasks, arms, seeds, outcomes(results)):
        if not any(_make(job, results, work) for job in ready):
            time.sleep(_LOOK_AGAIN_S)  # others are at all of them


def _make(job: Job, results: Path, work: Path) -> bool:
    """False where another process is at it."""
    with (work / "locks" / "-".join(map(str, job.key))).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if job.key in outcomes(results):
            return True
        budget = TUNING_BUDGET if job.seed in TUNING_SEEDS else BUDGET
        outcome = play(job.task, job.values, job.seed, work, budget=budget)
        add_result(results, {**vars(job), **outcome})
        print(told(job, outcome), flush=True)
    return True


def told(job: Job, outcome: Outcome) -> str:
    fresh, _, _, calls, runs, cpu, wall = (sum(column) for column in zip(*outcome["iterations"], strict=True))
    success = ", ".join(f"{success:.1%}" for _, success in outcome["evaluations"][-2:])
    return (
        f"{job.task} {job.arm} {job.setting} seed {job.seed}: {success} after {fresh} fresh, {calls} calls "
        f"({runs} run), {cpu:.0f} CPU-s, {wall:.0f} s"
    )


def main(arguments: Sequence[str] = ()) -> dict[str, float]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay_study", description=__doc__)
    parser.add_argument("--run", action="store_true", help="make the runs that are missing: hours")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=WORK, help="for warmed-up models and runs in progress")
    given = parser.parse_args(arguments)
    if given.run:
        with suppress(KeyboardInterrupt):
            run(given.tasks, given.arms, given.seeds, results=given.results, work=given.work)
    found = outcomes(given.results)
    return {
        f"{task} {arm} {setting} {seed}": score(found[task, arm, setting, seed]) for task, arm, setting, seed in found
    }


if __name__ == "__main__":
    for name, value in main(sys.argv[1:]).items():
        print(f"{name:<60} {value:8,.0f}")
