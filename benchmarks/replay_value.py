"""Does replay pay? Fresh episodes and CPU-seconds to 90 % held-out success, with replay and without.

`--run` adds the runs that the results file lacks, one JSON line each, and can be stopped at any time; `--report` writes
the tables and plots of docs/evidence.md from that file; `--quick` trains a pair of arms on one seed for a minute.
"""

from __future__ import annotations

import argparse
import fcntl
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks._replay_arms import ARMS, SEEDS, TASKS
from benchmarks._replay_runs import ROOT, add_result, read_results, run_arm

RESULTS = ROOT / "docs" / "evidence" / "results.jsonl"
WORK = ROOT / "runs" / "replay_value"


def run(tasks: Sequence[str], arms: Sequence[str], seeds: Iterable[int], *, results: Path, work: Path) -> None:
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
                    result = {"arm": arm, **run_arm(task, ARMS[arm].settings, seed, work)}
                    add_result(results, result)
                    iterations, fresh, _, _, cpu, wall, success = result["curve"][-1]
                    print(
                        f"{task} {arm} seed {seed}: {success:.1%} after {iterations} iterations, {fresh} fresh, "
                        f"{cpu:.1f} CPU-s, {wall:.1f} s; {[round(point[-1], 2) for point in result['curve']]}",
                        flush=True,
                    )


def main(arguments: Sequence[str] = ()) -> dict[str, float]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay_value", description=__doc__)
    parser.add_argument("--run", action="store_true", help="make the runs that the results lack: hours")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=WORK, help="for warmed-up models and runs in progress")
    given = parser.parse_args(arguments)
    if given.run:
        run(given.tasks, given.arms, given.seeds, results=given.results, work=given.work)
    return {}


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
