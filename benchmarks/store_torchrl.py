"""The replay buffer beside torchrl's on memory-mapped files, on the same trajectories.

What torchrl's does not do: it never waits for the disk (no fsync: what was added last is lost with the machine), rows
are padded to one length, and a row is its arrays alone: no messages, run, policy or group, no check of what is read.
Here all rows have one length, so that it need not pad.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._goals import show
from benchmarks._rows import ROWS, RUN, TASK, TOKENS, add_run, make_group, make_trajectory, paired_ratio, seconds
from benchmarks._stores import FIELDS
from replay import DrawRequest, Pick, ReplayStore, Trajectory, make_sampler

INSTALL = "pip install --no-deps torchrl 'tensordict>=0.14.3,<0.15' pyvers cloudpickle hoptorch orjson"


class TorchRL:
    def __init__(self, folder: Path, rows: int) -> None:
        with warnings.catch_warnings():  # about parts of torchrl that are not installed and not used
            warnings.simplefilter("ignore")
            from tensordict import TensorDict
            from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
        self._batch = TensorDict
        storage = LazyMemmapStorage(rows, scratch_dir=folder)
        self._buffer: Any = TensorDictReplayBuffer(storage=storage, batch_size=ROWS)

    def append(self, rows: list[Trajectory]) -> None:
        columns = {
            field: torch.from_numpy(np.stack([getattr(row.segments[0].tokens, field) for row in rows]))
            for field in FIELDS
        }
        self._buffer.extend(self._batch(columns, batch_size=[len(rows)]))

    def draw(self) -> object:
        return self._buffer.sample()


def measure(rounds: int, folder: Path) -> dict[str, float]:
    """Medians: milliseconds of both, and ours over theirs; kilobytes on disk per trajectory."""
    random = np.random.default_rng(0)
    store = add_run(ReplayStore.create(folder / "store.sqlite"))
    other = TorchRL(folder / "torchrl", rounds * ROWS)
    sampler = make_sampler("success", 0)
    times: dict[str, list[float]] = {name: [] for name in ("append", "append_torchrl", "draw", "draw_torchrl")}
    for iteration in range(1, rounds + 1):
        rows = [make_trajectory(random, iteration=iteration, slot=slot) for slot in range(ROWS)]
        times["append"].append(seconds(partial(store.append, [TASK], [make_group(iteration)], rows)))
        times["append_torchrl"].append(seconds(partial(other.append, rows)))
        request = DrawRequest(RUN, iteration + 1, 0, (Pick(ROWS),))
        times["draw"].append(seconds(partial(store.draw, request, sampler)))
        times["draw_torchrl"].append(seconds(other.draw))
    store.close()
    found = {f"{name}_ms": 1e3 * statistics.median(each) for name, each in times.items()}
    for name in ("append", "draw"):
        found[f"{name}_time_to_torchrl"] = paired_ratio(times[name], times[f"{name}_torchrl"])
    files = [file for file in (folder / "torchrl").rglob("*") if file.is_file()]
    count = rounds * ROWS
    found["disk_kb"] = (folder / "store.sqlite").stat().st_size / count / 1e3
    found["disk_torchrl_kb"] = sum(file.stat().st_size for file in files) / count / 1e3
    return found


def main(rounds: int = 20) -> dict[str, float]:
    print(f"torchrl's LazyMemmapStorage, {ROWS} trajectories of {TOKENS:,} tokens, {rounds} paired rounds, medians")
    if any(importlib.util.find_spec(name) is None for name in ("torchrl", "tensordict")):
        print(f"  left out: it is not installed. {INSTALL}")
        return {}
    with tempfile.TemporaryDirectory() as folder:
        found = measure(rounds, Path(folder))
    show(found, {})
    print("  torchrl: no fsync, one length for all rows (padding), no messages, no provenance, no check when read")
    return found


if __name__ == "__main__":
    main()
