"""A buffer of 100,000 trajectories as a DataFrame: `replay.open(...)`, and what sqlite3 and pyarrow take by hand.

Both read the same columns of the same file in turn; each side is the median of some rounds in one process. Memory is
the peak of a process of its own that only makes the DataFrame.
"""

import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

import replay
from benchmarks._buffer import fill
from benchmarks._rows import RUN, seconds
from replay import ReplayStore
from replay.storage.format.views import DERIVED, TRAJECTORY_COLUMNS

SIZE, TOKEN_ROWS = 100_000, 1_000
GOALS = {
    **dict.fromkeys(("frame_ratio", "stored_ratio"), "<= 1.5"),
    "frame_peak_mb": "<= 400",
    "tokens_s": "<= 1",
    "view_ratio": "<= 1.05",
}
_STORED = "select {} from trajectories"
_COUNTED = "select source, stop_reason, count(*), avg(reward) from {} where num_tokens > 10 group by 1, 2"


def by_hand(file: Path, query: str) -> pa.Table:
    with closing(sqlite3.connect(file)) as connection:
        found = connection.execute(query)
        names = [column[0] for column in found.description]
        return pa.table(dict(zip(names, map(pa.array, zip(*found.fetchall(), strict=True)), strict=True)))


def paired(one: Callable[[], object], other: Callable[[], object], rounds: int) -> tuple[float, float]:
    times = [(seconds(one), seconds(other)) for _ in range(rounds)]
    return statistics.median(a for a, _ in times), statistics.median(b for _, b in times)


_PEAK = """
import re, sys, replay
replay.open(sys.argv[1]).trajectories().to_pandas()
print(int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) / 1024)  # its own, not its parent's
"""


def peak_mb(file: Path) -> float:
    made = subprocess.run([sys.executable, "-c", _PEAK, file], check=True, capture_output=True, text=True)
    return float(made.stdout)


def measure(folder: Path, *, size: int = SIZE, rounds: int = 5) -> dict[str, float]:
    file = folder / "replay.sqlite"
    with closing(ReplayStore.create(file)) as store:
        fill(store, size, np.random.default_rng(0))
    buffer = replay.open(str(file))
    stored = [name for name in TRAJECTORY_COLUMNS if name not in DERIVED]
    ours, raw = paired(buffer.trajectories().to_arrow, partial(by_hand, file, "select * from v_trajectories"), rounds)
    table_ours, table_raw = paired(
        buffer.trajectories(columns=stored).to_arrow, partial(by_hand, file, _STORED.format(", ".join(stored))), rounds
    )
    on_view, on_table = [partial(by_hand, file, _COUNTED.format(of)) for of in ("v_trajectories", "trajectories")]
    view, table = paired(on_view, on_table, rounds)
    lists = buffer.trajectories(f"run == '{RUN}' and iteration <= {TOKEN_ROWS // 64 + 1}", ["id", "token_id", "author"])
    return {
        "frame_s": ours,
        "frame_ratio": ours / raw,
        "stored_ratio": table_ours / table_raw,
        "frame_peak_mb": peak_mb(file),
        "tokens_s": seconds(lambda: lists.to_arrow()),
        "view_ratio": view / table,
    }


def main() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder))
