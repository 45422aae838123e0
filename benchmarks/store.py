"""The replay buffer against the least a database can do: raw sqlite3 blobs of the same bytes, same durability.

Rounds alternate within one run, so that whatever slows the machine slows both; ratios are what to read.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from context.authors import ENV, LLM, TEMPLATE, default_authors
from context.messages import Message, to_template
from context.tokens import Segment, TokenSequence
from replay import (
    DrawRequest,
    GroupRecord,
    Pick,
    PolicyRecord,
    ReplayStore,
    RunRecord,
    TaskRecord,
    Trajectory,
    TrajectoryRecord,
    make_sampler,
)

ROWS, TOKENS = 64, 2000
GOALS = {"append": 2.0, "draw": 4.0}
_RUN = "benchmark"
_FIELDS = ("token_ids", "authors", "behavior_log_probs", "policy_versions")


def make_tokens(random: np.random.Generator) -> TokenSequence:
    """Word-like ids (Zipf), about half of them sampled, in turns of 40 tokens."""
    authors = default_authors()
    turn = np.repeat([authors.code(name) for name in (TEMPLATE, LLM, ENV, LLM)], [4, 18, 16, 2])
    codes = np.resize(turn, TOKENS).astype(np.uint8)
    sampled = authors.is_action(codes)
    return TokenSequence(
        np.minimum(random.zipf(1.2, TOKENS), 32_000).astype(np.int32),
        codes,
        np.where(sampled, -random.exponential(0.3, TOKENS), np.nan).astype(np.float32),
        np.where(sampled, 0, -1).astype(np.int32),
    )


def make_trajectory(random: np.random.Generator, *, iteration: int, slot: int) -> Trajectory:
    """One with 2,000 tokens and 20 messages of about 390 characters."""
    tokens = make_tokens(random)
    log_probs = tokens.behavior_log_probs[tokens.policy_versions >= 0]
    words = random.integers(0, 10**8, (20, 44))
    messages = tuple(Message("tool", " ".join(map(str, row)), author=ENV) for row in words.tolist())
    record = TrajectoryRecord(
        id=f"{iteration:08d}{slot:08d}",
        run=_RUN,
        group=f"group-{iteration}",
        task="task",
        iteration=iteration,
        slot=slot,
        member=slot,
        attempt=0,
        source="self",
        reward=float(slot % 2),
        success=bool(slot % 2),
        advantage=0.0,
        stop_reason="final",
        error_kind=None,
        num_turns=10,
        num_tool_calls=9,
        num_tokens=TOKENS,
        num_action_tokens=len(log_probs),
        policy_version_min=0,
        policy_version_max=0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        logprobs_mode="full",
        mean_entropy=None,
        mean_behavior_log_prob=float(log_probs.mean()),
        min_behavior_log_prob=float(log_probs.min()),
        environment="benchmark",
        environment_version="1",
    )
    return Trajectory(record, (Segment(tokens),), messages)


class Raw:
    """One table, one blob per field, no checks, no compression; as durable as the store."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        for setting in ("journal_mode=WAL", "synchronous=FULL"):
            self._connection.execute(f"PRAGMA {setting}")
        self._connection.execute(f"CREATE TABLE raw (id TEXT PRIMARY KEY, {', '.join(_FIELDS)}, messages)")

    def append(self, rows: list[Trajectory]) -> None:
        values = []
        for row in rows:
            tokens = row.segments[0].tokens
            messages = json.dumps([to_template(message) for message in row.messages])
            values.append((row.id, *(getattr(tokens, field).tobytes() for field in _FIELDS), messages))
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany("INSERT INTO raw VALUES (?, ?, ?, ?, ?, ?)", values)
        self._connection.execute("COMMIT")

    def read(self, ids: list[str]) -> list[TokenSequence]:
        marks = ", ".join("?" * len(ids))
        query = f"SELECT {', '.join(_FIELDS)} FROM raw WHERE id IN ({marks})"  # noqa: S608  names of this file
        dtypes = (np.int32, np.uint8, np.float32, np.int32)
        found = self._connection.execute(query, ids)
        return [TokenSequence(*map(np.frombuffer, row, dtypes)) for row in found]

    def close(self) -> None:
        self._connection.close()


def new_store(path: Path) -> ReplayStore:
    store = ReplayStore.create(path)
    authors = default_authors()
    store.add_run(RunRecord(_RUN, _RUN, {}, authors.to_json(), authors.hash, "0"))
    store.add_policy(PolicyRecord(_RUN, 0, None, "tokenizer", "template"))
    return store


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(rounds: int, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """(store, raw) seconds of every round: append 64 trajectories, then draw 64 of all there are."""
    random = np.random.default_rng(0)
    store, raw = new_store(folder / "store.sqlite"), Raw(folder / "raw.sqlite")
    sampler = make_sampler("success", 0)
    times: dict[str, list[tuple[float, float]]] = {"append": [], "draw": []}
    task = TaskRecord("task", "benchmark", {})
    for iteration in range(1, rounds + 1):
        rows = [make_trajectory(random, iteration=iteration, slot=slot) for slot in range(ROWS)]
        group = GroupRecord(f"group-{iteration}", _RUN, "task", iteration, ROWS, 0.5, 0.5, 0.5)
        mine = seconds(lambda group=group, rows=rows: store.append([task], [group], rows))  # type: ignore[misc]  # bound now
        theirs = seconds(lambda rows=rows: raw.append(rows))  # type: ignore[misc]  # bound now
        times["append"].append((mine, theirs))
        request = DrawRequest(_RUN, iteration + 1, 0, (Pick(ROWS),))
        mine = seconds(lambda request=request: store.draw(request, sampler))  # type: ignore[misc]  # bound now
        places = zip(random.integers(1, iteration + 1, ROWS), random.permutation(ROWS), strict=True)
        ids = [f"{born:08d}{slot:08d}" for born, slot in places]
        theirs = seconds(lambda ids=ids: raw.read(ids))  # type: ignore[misc]  # bound now
        times["draw"].append((mine, theirs))
        store.resume(_RUN, iteration)
    store.close()
    raw.close()
    return times


def ratios(times: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """Median over rounds of store / raw."""
    return {name: statistics.median(mine / theirs for mine, theirs in pairs) for name, pairs in times.items()}


def main(rounds: int = 30) -> dict[str, float]:
    """Print the table; the ratios by name, with the share of the raw bytes the store takes on disk."""
    with tempfile.TemporaryDirectory() as folder:
        times = measure(rounds, Path(folder))
        sizes = [(Path(folder) / name).stat().st_size for name in ("store.sqlite", "raw.sqlite")]
    found = ratios(times)
    print(f"replay buffer, {ROWS} trajectories of {TOKENS:,} tokens, {rounds} paired rounds, medians")
    print(f"{'':<8}{'store ms':>10}{'raw ms':>10}{'ratio':>8}{'goal':>8}")
    for name, pairs in times.items():
        mine, theirs = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:<8}{mine:>10.1f}{theirs:>10.1f}{found[name]:>8.2f}{'<= ' + format(GOALS[name], '.0f'):>8}")
    found["disk"] = sizes[0] / sizes[1]
    print(f"on disk: {found['disk']:.2f} of the raw bytes")
    return found


if __name__ == "__main__":
    main()
