"""Writers of one file on a slow disk: how long an append takes when each fsync takes 100 ms.

The disk is made slow by strace, which holds up every fsync and fdatasync of the traced processes. *raw* is one table of
SQLite with a blob per row, `synchronous=FULL`: as durable, and what a writer waits for it waits for with the lock held.
"""

from __future__ import annotations

import multiprocessing
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._rows import TASK, add_run, make_group, make_trajectory
from benchmarks._strace import traced
from replay import ReplayStore, Trajectory

WRITERS, COMMITS = 8, 6
SYNC_MS = 100
GOALS = {"raw_over_buffer": ">= 2"}
_BUFFER, _RAW = "buffer", "raw"


def _buffer(path: Path) -> Callable[[int, Trajectory], None]:
    store = ReplayStore.open(path)
    return lambda iteration, row: store.append([TASK], [make_group(iteration, 1)], [row]) and None


def _raw(path: Path) -> Callable[[int, Trajectory], None]:
    connection = sqlite3.connect(path, isolation_level=None, timeout=120)
    connection.execute("PRAGMA synchronous=FULL")

    def append(iteration: int, row: Trajectory) -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO raw VALUES (?, ?)", (row.id, row.segments[0].tokens.token_ids.tobytes()))
        connection.execute("COMMIT")

    return append


def write(path: Path, arm: str, writer: int, start: Barrier, answers: Any) -> None:
    """Answers the seconds that each append took."""
    append = {_BUFFER: _buffer, _RAW: _raw}[arm](path)
    random = np.random.default_rng(writer)
    first = 1 + writer * COMMITS
    rows = {n: make_trajectory(random, iteration=n, slot=0) for n in range(first, first + COMMITS)}
    start.wait()
    took = []
    for iteration, row in rows.items():
        began = time.perf_counter()
        append(iteration, row)
        took.append(time.perf_counter() - began)
    answers.put(took)


def slowed(folder: Path, arm: str) -> tuple[float, float]:
    """Milliseconds, the mean and the longest append; what the slowed process does."""
    path = folder / f"{arm}.sqlite"
    if arm == _BUFFER:
        add_run(ReplayStore.create(path)).close()
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("CREATE TABLE raw (id TEXT PRIMARY KEY, tokens BLOB)")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks._rows"])
    start, answers = context.Barrier(WRITERS), context.Queue()
    writers = [context.Process(target=write, args=(path, arm, n, start, answers)) for n in range(WRITERS)]
    for process in writers:
        process.start()
    took = [seconds for _ in writers for seconds in answers.get(timeout=300)]
    for process in writers:
        process.join()
    return 1e3 * statistics.mean(took), 1e3 * max(took)


def measure(folder: Path) -> dict[str, float]:
    """Raises CalledProcessError where tracing is not allowed."""
    slow = ["-e", "trace=fsync,fdatasync", "-e", f"inject=fsync,fdatasync:delay_enter={SYNC_MS}ms"]
    found = {}
    for arm in (_RAW, _BUFFER):
        command = [sys.executable, "-m", "benchmarks.store_slow_disk", str(folder), arm]
        strace = ["strace", "-f", "--seccomp-bpf", *slow, "-o", str(folder / "trace"), *command]
        done = subprocess.run(strace, check=True, capture_output=True, text=True)
        mean, longest = map(float, done.stdout.split())
        found |= {f"{arm}_mean_ms": mean, f"{arm}_longest_ms": longest}
    return {**found, "raw_over_buffer": found["raw_mean_ms"] / found["buffer_mean_ms"]}


def main() -> dict[str, float]:
    print(f"{WRITERS} writers with {COMMITS} commits each, every fsync {SYNC_MS} ms longer", flush=True)
    return traced(measure, GOALS)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(*slowed(Path(sys.argv[1]), sys.argv[2]))
    else:
        main()
