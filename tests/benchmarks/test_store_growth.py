"""A floor under the reported figure: a draw does not read the buffer."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.store_growth import measure

ATTEMPTS = 3


def test_a_draw_from_ten_times_the_rows_takes_less_than_twice_the_time(tmp_path: Path) -> None:
    for attempt in range(ATTEMPTS):  # neighbours on the same machine take caches and memory bandwidth
        folder = tmp_path / str(attempt)
        folder.mkdir()
        times = measure(folder, sizes=(1000, 10_000), rounds=3)
        growth = {name: statistics.median(times[name][10_000]) / statistics.median(times[name][1000]) for name in times}
        if growth["uniform"] < 2 and growth["recency"] < 2:
            return
    raise AssertionError(f"{growth} in the last of {ATTEMPTS} attempts")
