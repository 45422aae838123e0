"""A run with `capacity` that goes on and on: what it keeps and what an iteration costs stay as they are; what grows?

Iterations of 8 small rows, each with a generated task of its own, are appended, drawn from, committed, evicted and
purged as a run does it, a hundred to a transaction. Where nothing is measured, ten are appended and evicted at once,
and nothing is selected for their draws. Work is counted in instructions of SQLite's virtual machine, which are the same
every time; milliseconds are of this machine.
"""

from __future__ import annotations

import hashlib
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from benchmarks._goals import show
from benchmarks._rows import RUN, add_run, make_trajectory
from context.authors import default_authors
from replay import DrawRequest, GroupRecord, Pick, ReplayStore, TaskRecord, Trajectory, make_sampler
from replay.records import FRESH, REPLAY, DrawRecord, IterationRecord
from replay.sampling.draw import RunDraws
from replay.sampling.index import EligibleIndex
from replay.storage import draws, retention, write
from replay.storage.databases import create_database
from replay.storage.retention import Capacity

ROWS, DRAWN, TOKENS, CAPACITY = 8, 4, 32, 512
METRICS = 20
SIZES = (1_000, 10_000)
"""Iterations; others are given on the command line, such as 10000 100000."""
PARTS = ("append", "draw", "commit", "evict", "purge")
# Names of groups and tasks in memory are renumbered when there are more than twice as many as rows.
# Deeper trees cost a few instructions more; a part that read what went before would take ten times as many.
GOALS = {**{f"work_growth_{part}": "<= 1.25" for part in PARTS}, "rows_growth": "<= 1.0", "index_names_a_row": "<= 5"}
_BATCH, _PURGED_EVERY, _MEASURED = 100, 10, 500
_STEP = 100
"""Instructions between two counts."""


def _task(iteration: int) -> TaskRecord:
    hash = hashlib.sha256(str(iteration).encode()).hexdigest()
    return TaskRecord(hash, "benchmark", {"question": f"What is {iteration}? " * 40})


def _group(iteration: int, task: TaskRecord) -> GroupRecord:
    return GroupRecord(name("group", iteration), RUN, task.hash, iteration, ROWS, 0.5, 0.5, 0.5)


def name(*parts: object) -> str:
    """As long as a run's own ids."""
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:32]


@dataclass
class Work:
    """What the parts of iterations cost."""

    iterations: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    _counted: int = 0

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        began, before = time.perf_counter(), self._counted
        yield
        self.seconds[part] += time.perf_counter() - began  # type: ignore[assignment]  # a Counter counts anything
        self.steps[part] += self._counted - before

    def count(self, connection: sa.Connection) -> None:
        driver: Any = connection.connection.driver_connection

        def step() -> int:
            self._counted += _STEP
            return 0

        driver.set_progress_handler(step, _STEP)


class Run:
    """A make-believe run, without a model."""

    def __init__(self, path: Path) -> None:
        add_run(ReplayStore.create(path)).close()
        self._database = create_database(path)
        self._authors = {RUN: default_authors()}
        self._drawing, self._sampler = RunDraws(RUN), make_sampler("uniform", 0)
        self.index = EligibleIndex(RUN)
        """What a trainer has in memory of its rows."""
        random = np.random.default_rng(0)
        self._rows = [make_trajectory(random, iteration=0, slot=slot, num_tokens=TOKENS) for slot in range(ROWS)]

    def go_on(self, first: int, last: int, *, together: int = 1) -> Work:
        """`together`: how many iterations are appended, and then evicted, at once, for time to go by faster."""
        work = Work()
        for begin in range(first, last + 1, _BATCH):
            with self._database.writing() as connection:
                work.count(connection)
                end = min(begin + _BATCH, last + 1)
                for start in range(begin, end, together):
                    self._iterate(connection, range(start, min(start + together, end)), work)
                self.index.refresh(connection)
        return work

    def _iterate(self, connection: sa.Connection, iterations: Sequence[int], work: Work) -> None:
        work.iterations += len(iterations)
        last = iterations[-1]
        tasks = [_task(iteration) for iteration in iterations]
        groups = [_group(iteration, task) for iteration, task in zip(iterations, tasks, strict=True)]
        rows = [self._row(group, slot) for group in groups for slot in range(ROWS)]
        prepared = write.prepare(tasks, groups, rows, self._authors, compress_text=True)
        with work.of("append"):
            write.append(connection, prepared)
        for at, iteration in enumerate(iterations):
            fresh = rows[at * ROWS : (at + 1) * ROWS]
            self._update(connection, iteration, fresh, work, draws_blindly=len(iterations) > 1)
        with work.of("evict"):
            capacity = Capacity(rows=CAPACITY)
            over = retention.over_capacity(connection, RUN, last, policy_version=last, capacity=capacity)
            retention.evict(connection, over, iteration=last)
            retention.buffer_metrics(connection, RUN)
        if last % _PURGED_EVERY == 0:
            with work.of("purge"):
                retention.purge(connection, retention.evicted_through(connection, RUN, last))

    def _update(
        self, connection: sa.Connection, iteration: int, rows: Sequence[Trajectory], work: Work, *, draws_blindly: bool
    ) -> None:
        fresh = [DrawRecord(RUN, iteration, row.record.slot, row.id, FRESH, None, 0) for row in rows]
        with work.of("draw"):
            draws.reserve_given(connection, fresh)
            if draws_blindly:
                ids = [name(max(1, iteration - _PURGED_EVERY), slot) for slot in range(DRAWN)]
                drawn = [DrawRecord(RUN, iteration, ROWS + at, id, REPLAY, 0.01, 9) for at, id in enumerate(ids)]
                draws.reserve_given(connection, drawn)
            else:
                request = DrawRequest(RUN, iteration, iteration - 1, (Pick(DRAWN),), first_slot=ROWS)
                found = self._drawing.draw(connection, request, self._sampler)
                drawn = [row.draw for row in found if row.draw is not None]
        measured = [
            replace(draw, advantage=0.31, drift_mean=1.02, drift_max=1.3, ess_share=0.07) for draw in [*fresh, *drawn]
        ]
        metrics = {f"actor/replay/quantity_{number}": iteration / 7 for number in range(METRICS)}
        record = IterationRecord(RUN, iteration, iteration - 1, ROWS, DRAWN, ROWS, len(drawn), 0.33, 2, metrics)
        with work.of("commit"):
            draws.commit(connection, record, measured, sampler_state=self._sampler.state())

    def _row(self, group: GroupRecord, slot: int) -> Trajectory:
        row = self._rows[slot]
        id, iteration = name(group.iteration, slot), group.iteration
        return replace(row, record=replace(row.record, id=id, group=group.id, task=group.task, iteration=iteration))

    def close(self) -> None:
        self._database.close()


def stored(path: Path) -> dict[str, tuple[int, int]]:
    """Rows, and bytes of pages with those of its indexes, of each table."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        tables = [each for (each,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        sizes = dict(
            database.execute(
                "SELECT tbl_name, sum(pgsize) FROM dbstat JOIN sqlite_master USING (name) GROUP BY tbl_name"
            )
        )
        # Constant names: the tables are this project's own.
        return {each: (database.execute(f"SELECT count(*) FROM {each}").fetchone()[0], sizes[each]) for each in tables}  # noqa: S608


def measure(folder: Path, sizes: tuple[int, ...], measured: int = _MEASURED) -> dict[str, float]:
    """Figures at each number of iterations gone by, the work of the last `measured` before it, and how it grows."""
    path = folder / "capacity.sqlite"
    run = Run(path)
    found: dict[str, float] = {}
    done = 0
    tables: list[dict[str, tuple[int, int]]] = []
    for size in sizes:
        run.go_on(done + 1, size - measured - _BATCH, together=_PURGED_EVERY)
        run.go_on(size - measured - _BATCH + 1, size - measured)
        work, done = run.go_on(size - measured + 1, size), size
        tables.append(stored(path))
        found |= {
            f"{size}_rows": tables[-1]["trajectories"][0],
            f"{size}_reclaimed": tables[-1]["reclaimed"][0],
            f"{size}_rows_MB": sum(tables[-1][each][1] for each in ("trajectories", "segments", "messages")) / 1e6,
            f"{size}_file_MB": path.stat().st_size / 1e6,
            f"{size}_index_rows": len(run.index),
            f"{size}_index_names": sum(len(codes.names) for codes in run.index.codes.values()),
        }
        for part in PARTS:
            found[f"{size}_{part}_instructions"] = work.steps[part] / work.iterations
            found[f"{size}_{part}_ms"] = 1e3 * work.seconds[part] / work.iterations
        show({each: found[each] for each in found if each.startswith(f"{size}_")}, {})
    run.close()
    small, large = sizes[0], sizes[-1]
    for part in PARTS:
        found[f"work_growth_{part}"] = found[f"{large}_{part}_instructions"] / found[f"{small}_{part}_instructions"]
    found["index_names_a_row"] = found[f"{large}_index_names"] / found[f"{large}_index_rows"]
    found["rows_growth"] = found[f"{large}_rows"] / found[f"{small}_rows"]
    for table in tables[0]:
        grown = (tables[-1][table][1] - tables[0][table][1]) / (large - small)
        if grown >= 1:
            found[f"bytes_an_iteration_{table}"] = grown
    found["bytes_an_iteration"] = 1e6 * (found[f"{large}_file_MB"] - found[f"{small}_file_MB"]) / (large - small)
    return found


def main(sizes: tuple[int, ...] = SIZES) -> dict[str, float]:
    print(f"capacity {CAPACITY} rows; {ROWS} rows an iteration, {DRAWN} drawn, {METRICS} metrics; {sizes} iterations")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), sizes)
    show({each: found[each] for each in found if not each[0].isdigit()}, GOALS)
    return found


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or SIZES)
