"""The replay buffer, raw sqlite3 blobs of the same bytes and durability, and torchrl's buffer where it is installed.

Rounds alternate within one run, so that whatever slows the machine slows all; ratios are what to read. torchrl's does
less: no fsync, one length for all rows, no messages, no provenance, no check when it reads.
"""

import importlib.util
import json
import sqlite3
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._rows import ROWS, RUN, TASK, TOKENS, make_trajectory, seconds
from context.messages import to_template
from context.tokens.token_sequence import TokenSequence
from replay import DrawRequest, Limits, Pick, ReplayStore, Trajectory, make_sampler
from replay.records import group_of
from tests.fakes.records import add_run

GOALS = {"append_rate_to_raw": ">= 0.5", "draw_time_to_raw": "<= 3.5", "disk_to_raw_bytes": "<= 0.45"}
FIELDS = ("token_ids", "authors", "behavior_log_probs", "policy_versions")
DTYPES = (np.int32, np.uint8, np.float32, np.int32)
Times = dict[str, dict[str, list[float]]]
"""Seconds of every round, by what was done and by store."""


def raw_values(row: Trajectory) -> tuple[str | bytes, ...]:
    """Id, one blob per field, and the messages as JSON."""
    tokens = row.segments[0].tokens
    messages = json.dumps([to_template(message) for message in row.messages])
    return (row.id, *(getattr(tokens, field).tobytes() for field in FIELDS), messages)


class Raw:
    """sqlite3, one table, one blob per field, no checks, no compression; as durable as the buffer."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        for setting in ("journal_mode=WAL", "synchronous=FULL"):
            self._connection.execute(f"PRAGMA {setting}")
        self._connection.execute(f"CREATE TABLE raw (id TEXT PRIMARY KEY, {', '.join(FIELDS)}, messages)")

    def append(self, rows: Sequence[Trajectory]) -> None:
        values = [raw_values(row) for row in rows]
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany("INSERT INTO raw VALUES (?, ?, ?, ?, ?, ?)", values)
        self._connection.execute("COMMIT")

    def draw(self, ids: Sequence[str]) -> list[TokenSequence]:
        marks = ", ".join("?" * len(ids))
        query = f"SELECT {', '.join(FIELDS)} FROM raw WHERE id IN ({marks})"  # noqa: S608  names of this file
        return [TokenSequence(*map(np.frombuffer, row, DTYPES)) for row in self._connection.execute(query, ids)]


class TorchRL:
    """`TensorDictReplayBuffer` on `LazyMemmapStorage`."""

    def __init__(self, folder: Path, rows: int) -> None:
        with warnings.catch_warnings():  # about parts of torchrl that are not installed and not used
            warnings.simplefilter("ignore")
            from tensordict import TensorDict
            from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
        self._batch = TensorDict
        storage = LazyMemmapStorage(rows, scratch_dir=folder)
        self._buffer: Any = TensorDictReplayBuffer(storage=storage, batch_size=ROWS)

    def append(self, rows: Sequence[Trajectory]) -> None:
        arrays = {field: np.stack([getattr(row.segments[0].tokens, field) for row in rows]) for field in FIELDS}
        columns = {field: torch.from_numpy(array) for field, array in arrays.items()}
        self._buffer.extend(self._batch(columns, batch_size=[len(rows)]))

    def draw(self, ids: Sequence[str]) -> object:
        return self._buffer.sample()


def measure(rounds: int, folder: Path) -> Times:
    """Append 64 trajectories, then draw 64 of all there are.

    Between the two, the buffer's index follows what was appended; the others have none.
    """
    random = np.random.default_rng(0)
    store = add_run(ReplayStore.create(folder / "store.sqlite"), RUN)
    others: dict[str, Raw | TorchRL] = {"raw": Raw(folder / "raw.sqlite")}
    if all(importlib.util.find_spec(name) is not None for name in ("torchrl", "tensordict")):
        others["torchrl"] = TorchRL(folder / "torchrl", rounds * ROWS)
    sampler = make_sampler("success", 0)
    times: Times = {name: {store: [] for store in ("store", *others)} for name in ("append", "draw")}
    times["refresh"] = {"store": []}
    stored: list[str] = []
    for iteration in range(1, rounds + 1):
        rows = [make_trajectory(random, iteration=iteration, slot=slot) for slot in range(ROWS)]
        stored += [row.id for row in rows]
        append = partial(store.append, [TASK], [group_of(rows)], rows)
        times["append"]["store"].append(seconds(append))
        for name, other in others.items():
            times["append"][name].append(seconds(partial(other.append, rows)))
        request = DrawRequest(RUN, iteration + 1, 0, (Pick(ROWS),), limits=Limits(successful_only=False))
        times["refresh"]["store"].append(seconds(partial(store.available, request, sampler)))
        times["draw"]["store"].append(seconds(partial(store.draw, request, sampler)))
        ids = random.choice(stored, ROWS, replace=False).tolist()
        for name, other in others.items():
            times["draw"][name].append(seconds(partial(other.draw, ids)))
    store.close()
    return times


def figures(times: Times, folder: Path) -> dict[str, float]:
    """Medians over rounds: milliseconds of each store and the ratios within a round; kilobytes per trajectory."""
    found = {
        f"{action}_{name}_ms": 1e3 * statistics.median(each)
        for action, by_store in times.items()
        for name, each in by_store.items()
    }
    for name in times["append"].keys() - {"store"}:
        pairs = {action: zip(times[action]["store"], times[action][name], strict=True) for action in ("append", "draw")}
        found[f"append_rate_to_{name}"] = statistics.median(theirs / ours for ours, theirs in pairs["append"])
        found[f"draw_time_to_{name}"] = statistics.median(ours / theirs for ours, theirs in pairs["draw"])
        files = [folder / "raw.sqlite"] if name == "raw" else (folder / name).rglob("*.*")
        found[f"disk_{name}_kb"] = sum(file.stat().st_size for file in files) / ROWS / len(times["append"][name]) / 1e3
    size = (folder / "store.sqlite").stat().st_size / ROWS / len(times["append"]["store"])
    in_memory = sum(map(len, raw_values(make_trajectory(np.random.default_rng(0), iteration=1, slot=0))[1:]))
    return found | {"disk_store_kb": size / 1e3, "disk_to_raw_bytes": size / in_memory}


def main(rounds: int = 30) -> dict[str, float]:
    print(f"replay buffer, {ROWS} trajectories of {TOKENS:,} tokens, {rounds} paired rounds, medians")
    with tempfile.TemporaryDirectory() as folder:
        return figures(measure(rounds, Path(folder)), Path(folder))
