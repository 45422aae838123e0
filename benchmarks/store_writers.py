"""1, 8 and 32 processes that append to one file, and one that reads it all the while: appends per second, the longest
wait, what was lost, and who saw an error."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from benchmarks._goals import show
from benchmarks._rows import TASK, add_run, make_group, make_trajectory, row_id
from replay import ReplayStore, Trajectory
from replay.storage.format.schema import segments, trajectories

WRITERS, COMMITS, ROWS = (1, 8, 32), 256, 4
GOALS = {f"{figure}_{count}": "<= 0" for count in WRITERS for figure in ("lost", "errors", "torn")}


def write(path: Path, iterations: range, rows: Sequence[Trajectory], start: Barrier, answers: Any) -> None:
    """Appends a batch of ids of its own per iteration, and answers the seconds each took, or its error."""
    took = []
    try:
        store = ReplayStore.open(path)
        start.wait()
        for iteration in iterations:
            batch = [_renamed(row, iteration, slot) for slot, row in enumerate(rows)]
            began = time.perf_counter()
            store.append([TASK], [make_group(iteration, ROWS)], batch)
            took.append(time.perf_counter() - began)
        answers.put((took, None))
    except BaseException:  # noqa: BLE001  told to the parent, which counts it
        answers.put((took, traceback.format_exc()))


def read(path: Path, start: Barrier, done: Event, answers: Any) -> None:
    """Until the writers are done: whole rows only, and never fewer than before."""
    torn, rounds, before = 0, 0, 0
    try:
        store = ReplayStore.open(path, read_only=True)
        start.wait()
        while not done.is_set():
            with store.reading() as connection:
                count = connection.scalar(sa.select(sa.func.count()).select_from(trajectories)) or 0
                parts = connection.scalar(sa.select(sa.func.count()).select_from(segments)) or 0
                newest = sa.select(trajectories.c.id).order_by(trajectories.c.changed.desc()).limit(ROWS)
                ids = list(connection.scalars(newest))
            torn += count != parts or count < before or count % ROWS != 0
            store.read(ids)
            rounds, before = rounds + 1, count
        answers.put((torn, rounds, None))
    except BaseException:  # noqa: BLE001  told to the parent, which counts it
        answers.put((torn, rounds, traceback.format_exc()))


def _renamed(row: Trajectory, iteration: int, slot: int) -> Trajectory:
    id, group = row_id(iteration, slot), f"group-{iteration}"
    return replace(row, record=replace(row.record, id=id, iteration=iteration, slot=slot, group=group, member=slot))


def measure(folder: Path, count: int) -> dict[str, float]:
    """`COMMITS` appends of `ROWS` rows, divided among `count` writers."""
    path = folder / f"store-{count}.sqlite"
    add_run(ReplayStore.create(path)).close()
    random = np.random.default_rng(0)
    rows = [make_trajectory(random, iteration=1, slot=slot) for slot in range(ROWS)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks._rows"])
    start, done = context.Barrier(count + 2), context.Event()
    answers, seen = context.Queue(), context.Queue()
    parts = [range(1 + n * COMMITS // count, 1 + (n + 1) * COMMITS // count) for n in range(count)]
    writers = [context.Process(target=write, args=(path, part, rows, start, answers)) for part in parts]
    reader = context.Process(target=read, args=(path, start, done, seen))
    for process in (*writers, reader):
        process.start()
    start.wait()
    began = time.perf_counter()
    told = [answers.get(timeout=300) for _ in writers]
    took = time.perf_counter() - began
    done.set()
    torn, rounds, failed = seen.get(timeout=300)
    for process in (*writers, reader):
        process.join()
    errors = [error for error in (*(error for _, error in told), failed) if error]
    for error in errors:
        print(error)
    expected = {row_id(1 + n, slot) for n in range(COMMITS) for slot in range(ROWS)}
    store = ReplayStore.open(path, read_only=True)
    with store.reading() as connection:
        stored = set(connection.scalars(sa.select(trajectories.c.id)))
    intact = len(store.read(sorted(stored)))  # raises for one that is not what was written
    store.close()
    waits = sorted(wait for each, _ in told for wait in each)
    found = {
        "lost": float(len(expected) - intact),
        "errors": float(len(errors)),
        "torn": float(torn),
        "reader_rounds": float(rounds),
        "appends_per_second": len(waits) / took,
        "append_median_ms": 1e3 * waits[len(waits) // 2] if waits else float("nan"),
        "append_longest_ms": 1e3 * waits[-1] if waits else float("nan"),
    }
    return {f"{name}_{count}": value for name, value in found.items()}


def main() -> dict[str, float]:
    print(f"{COMMITS} commits of {ROWS} trajectories each by {', '.join(map(str, WRITERS))} writers, beside a reader")
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in WRITERS:
            found |= measure(Path(folder), count)
    show(found, GOALS)
    return found


if __name__ == "__main__":
    main()
