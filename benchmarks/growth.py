"""How a draw of 64 rows grows with the buffer: from ten thousand rows of 64 tokens to a million.

Draws from both buffers alternate within one run, so that whatever slows the machine slows both; ratios are what to
read. Reading the buffer into memory at first, and following an append of 64 rows, are shown apart.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import sqlalchemy as sa

from benchmarks.store import make_trajectory, new_store
from context.tokens import Segment, TokenSequence
from replay import DrawRequest, GroupRecord, Pick, ReplayStore, TaskRecord, Trajectory, make_sampler

ROWS, TOKENS, MEMBERS = 64, 64, 8
SIZES = (10_000, 1_000_000)
SAMPLERS = ("uniform", "recency", "success", "advantage", "freshness")
GOALS = {"uniform": 1.5, "recency": 1.5}
_RUN = "benchmark"
_SEED_ROWS = 1000


def short(row: Trajectory, at: int) -> Trajectory:
    """Its first tokens, in a group of eight."""
    tokens = row.segments[0].tokens
    first = TokenSequence(*(getattr(tokens, name)[:TOKENS] for name in vars(tokens)))
    known = first.behavior_log_probs[first.policy_versions >= 0]
    record = replace(
        row.record,
        group=f"group-{row.record.iteration}-{at // MEMBERS}",
        num_tokens=TOKENS,
        num_action_tokens=len(known),
        mean_behavior_log_prob=float(known.mean()),
        min_behavior_log_prob=float(known.min()),
        advantage=float((at % 16) - 7.5),
    )
    return Trajectory(record, (Segment(first),), ())


def fill(store: ReplayStore, iteration: int, count: int, random: np.random.Generator) -> None:
    rows = [short(make_trajectory(random, iteration=iteration, slot=slot), slot) for slot in range(count)]
    names = dict.fromkeys(row.record.group for row in rows)
    groups = [GroupRecord(name, _RUN, "task", iteration, MEMBERS, 0.5, 0.5, 0.5) for name in names]
    store.append([TaskRecord("task", "benchmark", {})], groups, rows)


def multiply(path: Path, size: int) -> None:
    """Copies of the rows there are, in later iterations: a million of them one by one would take an hour."""
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        for table, id in (("groups", "id"), ("trajectories", "id"), ("segments", "trajectory")):
            columns = [str(row[1]) for row in connection.exec_driver_sql(f"PRAGMA table_info({table})")]
            copied = {
                id: f"{id} || '-' || n",
                "iteration": "iteration + n",
                "group_id": "group_id || '-' || n",
                "policy_version_min": "n / 10",
                "policy_version_max": "n / 10",
            }
            values = ", ".join(copied.get(name, name) for name in columns)
            connection.exec_driver_sql(
                f"WITH RECURSIVE copies(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM copies WHERE n < {size // _SEED_ROWS - 1}) "  # noqa: S608, E501
                f"INSERT INTO {table} SELECT {values} FROM copies, {table}"
            )
    engine.dispose()


def milliseconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - began)


def measure(folder: Path, *, sizes: tuple[int, ...], rounds: int) -> dict[str, dict[int, list[float]]]:
    """Milliseconds by what was done and size of the buffer."""
    random = np.random.default_rng(0)
    stores: dict[int, ReplayStore] = {}
    times: dict[str, dict[int, list[float]]] = {}
    for size in sizes:
        path = folder / f"{size}.sqlite"
        with_seed = new_store(path)
        fill(with_seed, 1, _SEED_ROWS, random)
        with_seed.close()
        multiply(path, size)
        stores[size] = ReplayStore.open(path)
    newest = max(sizes) // _SEED_ROWS + 2
    samplers = {name: make_sampler(name, 0) for name in SAMPLERS}
    for name, sampler in samplers.items():
        for size, store in stores.items():
            request = DrawRequest(_RUN, newest, newest // 10)
            first = milliseconds(lambda: store.available(request, sampler))  # noqa: B023  called now
            times.setdefault("read all rows" if name == SAMPLERS[0] else f"weigh all rows: {name}", {})[size] = [first]
    for turn in range(1, rounds + 1):
        for size, store in stores.items():
            fill(store, newest + turn, ROWS, random)
            request = DrawRequest(_RUN, newest + turn + 1, newest // 10, (Pick(ROWS),))
            followed = milliseconds(lambda: store.draw(replace(request, picks=()), samplers["uniform"]))  # noqa: B023
            times.setdefault("follow 64 rows", {}).setdefault(size, []).append(followed)
        for name, sampler in samplers.items():
            for size, store in stores.items():
                request = DrawRequest(_RUN, newest + turn + 1, newest // 10, (Pick(ROWS),))
                store.draw(replace(request, picks=()), sampler)
                taken = milliseconds(lambda: store.draw(request, sampler))  # noqa: B023  called now
                times.setdefault(name, {}).setdefault(size, []).append(taken)
                store.resume(_RUN, newest + turn)
    for store in stores.values():
        store.close()
    return times


def main(rounds: int = 15, sizes: tuple[int, int] = SIZES) -> dict[str, float]:
    """Print the table; the growth of each sampler's draw by name."""
    with tempfile.TemporaryDirectory() as folder:
        times = measure(Path(folder), sizes=sizes, rounds=rounds)
    small, large = sizes
    print(f"a draw of {ROWS} rows of {TOKENS} tokens by rows of the buffer, {rounds} rounds, medians, ms")
    print(f"{'':<28}{small:>12,}{large:>12,}{'growth':>8}{'goal':>8}")
    found = {}
    for name, by_size in times.items():
        least, most = (statistics.median(by_size[size]) for size in sizes)
        goal = f"<= {GOALS[name]}" if name in GOALS else ""
        print(f"{name:<28}{least:>12.1f}{most:>12.1f}{most / least:>8.2f}{goal:>8}")
        if name in SAMPLERS:
            found[name] = most / least
    return found


if __name__ == "__main__":
    main()
