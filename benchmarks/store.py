"""The replay buffer beside raw sqlite3 blobs of the same bytes and durability, and beside an ORM with a pickled column.

Rounds alternate within one run, so that whatever slows the machine slows all; ratios are what to read.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks._goals import show
from benchmarks._rows import (
    ROWS,
    RUN,
    TASK,
    TOKENS,
    add_run,
    fsync_milliseconds,
    make_group,
    make_trajectory,
    paired_ratio,
    random_ids,
    seconds,
)
from benchmarks._stores import Pickled, Raw, raw_bytes
from replay import DrawRequest, Pick, ReplayStore, make_sampler

GOALS = {
    "append_rate_to_raw": ">= 0.5",
    "append_rate_to_pickle": ">= 3",
    "draw_time_to_raw": "<= 3.5",
    "draw_time_to_pickle": "<= 0.25",
    "disk_to_raw_bytes": "<= 0.45",
}
Times = dict[str, dict[str, list[float]]]


def measure(rounds: int, folder: Path) -> Times:
    """Seconds of every round, by what was done and by store: append 64 trajectories, then draw 64 of all there are.

    Between the two, the buffer's index follows what was appended; the others have none.
    """
    random = np.random.default_rng(0)
    store = add_run(ReplayStore.create(folder / "store.sqlite"))
    others: dict[str, Raw | Pickled] = {
        "raw": Raw(folder / "raw.sqlite"),
        "pickle": Pickled(folder / "pickle.sqlite", tensors=True),
        "pickle_numpy": Pickled(folder / "pickle_numpy.sqlite", tensors=False),
    }
    sampler = make_sampler("success", 0)
    times: Times = {name: {store: [] for store in ("store", *others)} for name in ("append", "draw")}
    times["refresh"] = {"store": []}
    for iteration in range(1, rounds + 1):
        rows = [make_trajectory(random, iteration=iteration, slot=slot) for slot in range(ROWS)]
        append = partial(store.append, [TASK], [make_group(iteration)], rows)
        times["append"]["store"].append(seconds(append))
        for name, other in others.items():
            times["append"][name].append(seconds(partial(other.append, rows)))
        request = DrawRequest(RUN, iteration + 1, 0, (Pick(ROWS),))
        times["refresh"]["store"].append(seconds(partial(store.available, request, sampler)))
        times["draw"]["store"].append(seconds(partial(store.draw, request, sampler)))
        ids = random_ids(random, iteration)
        for name, other in others.items():
            times["draw"][name].append(seconds(partial(other.read, ids)))
    for each in (store, *others.values()):
        each.close()
    return times


def figures(times: Times, folder: Path) -> dict[str, float]:
    """Medians over rounds, milliseconds of each store and the ratios that have goals; bytes per trajectory."""
    append, draw = times["append"], times["draw"]
    found = {
        f"{action}_{name}_ms": 1e3 * statistics.median(each)
        for action, by_store in times.items()
        for name, each in by_store.items()
    }
    found["append_rate_to_raw"] = paired_ratio(append["raw"], append["store"])
    found["append_rate_to_pickle"] = paired_ratio(append["pickle"], append["store"])
    found["draw_time_to_raw"] = paired_ratio(draw["store"], draw["raw"])
    found["draw_time_to_pickle"] = paired_ratio(draw["store"], draw["pickle"])
    count = ROWS * len(append["store"])
    raw = raw_bytes(make_trajectory(np.random.default_rng(0), iteration=1, slot=0))
    for name in append:
        found[f"disk_{name}_kb"] = (folder / f"{name}.sqlite").stat().st_size / count / 1e3
    found["disk_to_raw_bytes"] = found["disk_store_kb"] * 1e3 / raw
    return found


def main(rounds: int = 30) -> dict[str, float]:
    print(f"replay buffer, {ROWS} trajectories of {TOKENS:,} tokens, {rounds} paired rounds, medians")
    with tempfile.TemporaryDirectory() as folder:
        found = {"fsync_ms": fsync_milliseconds(Path(folder))}
        found |= figures(measure(rounds, Path(folder)), Path(folder))
    show(found, GOALS)
    return found


if __name__ == "__main__":
    main()
