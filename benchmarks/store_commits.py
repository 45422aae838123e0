"""How often a commit waits for the disk: fsync and fdatasync calls of a process that appends, counted by strace.

SQLite also moves its log into the database file from time to time (a checkpoint): this is counted apart, by appending
once more without checkpoints. The traced process syncs a file of its own between the phases, to mark them in the trace.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import sqlalchemy as sa

from benchmarks._rows import ROWS, TASK, add_run, make_group, make_trajectory
from benchmarks._strace import traced
from replay import ReplayStore

COMMITS = 50
GOALS = {"fsyncs_per_commit": "<= 1"}
_PHASES = (("with_checkpoints_64_rows", ROWS), ("with_checkpoints_1_row", 1), ("fsyncs_per_commit", ROWS))
_MARK = "phase-"


def append_all(folder: Path) -> None:
    """What the traced process does: every phase with a database of its own, and only its commits between its marks."""
    random = np.random.default_rng(0)
    for name, rows in _PHASES:
        if name in GOALS:
            sa.event.listen(sa.Pool, "connect", lambda raw, _: raw.execute("pragma wal_autocheckpoint=0"))
        store = add_run(ReplayStore.create(folder / f"{name}.sqlite"))
        with open(folder / f"{_MARK}{name}", "wb") as mark:
            os.fsync(mark.fileno())
            for iteration in range(1, COMMITS + 1):
                batch = [make_trajectory(random, iteration=iteration, slot=slot) for slot in range(rows)]
                store.append([TASK], [make_group(iteration, rows)], batch)
            os.fsync(mark.fileno())
        store.close()


def measure(folder: Path) -> dict[str, float]:
    """Calls per commit, of all threads; raises CalledProcessError where tracing is not allowed."""
    log = folder / "strace.log"
    trace = ["strace", "-f", "--seccomp-bpf", "-y", "-e", "trace=fsync,fdatasync", "-o", str(log)]
    command = [*trace, sys.executable, "-m", "benchmarks.store_commits", str(folder)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    counts = {name: 0 for name, _ in _PHASES}
    phase = ""
    for line in log.read_text().splitlines():
        if found := re.search(rf"{_MARK}(\w+)>", line):
            phase = "" if phase else found[1]
        elif phase and re.search(r"(fsync|fdatasync)\(", line):
            counts[phase] += 1
    return {name: count / COMMITS for name, count in counts.items()}


def main() -> dict[str, float]:
    print(f"calls of fsync and fdatasync per commit, over {COMMITS} commits, counted by strace", flush=True)
    return traced(measure, GOALS)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        append_all(Path(sys.argv[1]))
    else:
        main()
