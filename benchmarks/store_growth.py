"""How a draw of 64 grows from a buffer of ten thousand rows to one of a million, and what its index costs apart.

Rows have 64 tokens. The large buffer is made by SQL from copies of 64 rows that the store wrote.
"""

from __future__ import annotations

import shutil
import sqlite3
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks._goals import show
from benchmarks._rows import ROWS, RUN, TASK, add_run, make_group, make_trajectory, paired_ratio, seconds
from replay import Drawn, DrawRequest, Pick, ReplayStore, Trajectory, make_sampler
from replay.schema import groups, segments, trajectories

SMALL, LARGE = 10_000, 1_000_000
TOKENS = 64
SAMPLERS = ("uniform", "recency", "advantage")
# A sum tree has log2(N) levels: log2(10^6) / log2(10^4) = 19.9 / 13.3 = 1.5.
GOALS = {f"growth_{name}": "<= 1.5" for name in SAMPLERS}
_FREE = 3 * 1024**3
# New values by column; `number` counts the copies.
_COPIES = {
    groups: {"id": "'group-' || (iteration + number)", "iteration": "iteration + number"},
    trajectories: {
        "id": "printf('%08d%08d', iteration + number, slot)",
        "group_id": "'group-' || (iteration + number)",
        "iteration": "iteration + number",
        "policy_version_min": "iteration + number",
        "policy_version_max": "iteration + number",
    },
    segments: {"trajectory": "printf('%08d%s', 1 + number, substr(trajectory, 9))"},
}


class Buffer:
    """A buffer of so many rows, and the run that draws from it."""

    def __init__(self, seed: Path, rows: int) -> None:
        self.path = seed.with_name(f"{rows}.sqlite")
        shutil.copy(seed, self.path)
        self.iteration = rows // ROWS
        _multiply(self.path, seed, self.iteration - 1)
        self.store = ReplayStore.create(self.path)
        self._samplers = {name: make_sampler(name, 0) for name in SAMPLERS}

    def draw(self, sampler: str) -> float:
        """Seconds of the next iteration's draw."""
        self.iteration += 1
        request = DrawRequest(RUN, self.iteration, self.iteration, (Pick(ROWS),))
        drawn: list[Drawn] = []
        took = seconds(lambda: drawn.extend(self.store.draw(request, self._samplers[sampler])))
        if len(drawn) != ROWS:
            raise RuntimeError(f"a draw must give {ROWS} rows, got {len(drawn)}.")
        return took

    def append(self, random: np.random.Generator) -> None:
        """What the run collects between two draws."""
        self.iteration += 1
        self.store.append([TASK], [make_group(self.iteration)], _rows(random, self.iteration))


def _rows(random: np.random.Generator, iteration: int) -> list[Trajectory]:
    return [
        make_trajectory(random, iteration=iteration, slot=slot, num_tokens=TOKENS, with_messages=False)
        for slot in range(ROWS)
    ]


def _multiply(path: Path, seed: Path, copies: int) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in ("pragma journal_mode=off", "pragma synchronous=off", "pragma cache_size=-500000"):
        connection.execute(statement)
    connection.execute("attach ? as seed", (str(seed),))
    connection.execute("begin")
    for table, changed in _COPIES.items():
        names = [column.name for column in table.columns]
        values = ", ".join(changed.get(name, name) for name in names)
        connection.execute(
            f"with recursive numbers(number) as (select 1 union all select number + 1 from numbers where number < ?) "  # noqa: S608  names of the schema
            f"insert into main.{table.name} ({', '.join(names)}) "
            f"select {values} from numbers cross join seed.{table.name}",
            (copies,),
        )
    connection.execute("commit")
    connection.execute("detach seed")
    connection.close()


def make_seed(folder: Path) -> Path:
    path = folder / "seed.sqlite"
    store = add_run(ReplayStore.create(path))
    store.append([TASK], [make_group(1)], _rows(np.random.default_rng(0), 1))
    store.close()
    return path


def measure(folder: Path, *, small: int = SMALL, large: int = LARGE, rounds: int = 30) -> dict[str, float]:
    """Medians by number of rows: milliseconds of a draw and its growth for each sampler, and of the index apart."""
    random = np.random.default_rng(0)
    seed = make_seed(folder)
    buffers = {rows: Buffer(seed, rows) for rows in (small, large)}
    found: dict[str, float] = {}
    for rows, buffer in buffers.items():
        # The first draw of a process reads every row into the index.
        found[f"first_draw_{rows}_s"] = buffer.draw("uniform")
    for name in SAMPLERS:
        times: dict[int, list[float]] = {rows: [] for rows in buffers}
        for rows, buffer in buffers.items():
            buffer.draw(name)  # weighs every row once
        for _ in range(rounds):
            for rows, buffer in buffers.items():
                times[rows].append(buffer.draw(name))
        for rows, each in times.items():
            found[f"{name}_{rows}_ms"] = 1e3 * statistics.median(each)
        found[f"growth_{name}"] = paired_ratio(times[large], times[small])
    for rows, buffer in buffers.items():
        found[f"refresh_{rows}_ms"] = 1e3 * statistics.median(_refresh(buffer, random) for _ in range(rounds // 3))
        buffer.store.close()
    return found


def _refresh(buffer: Buffer, random: np.random.Generator) -> float:
    """Seconds that 64 new rows add to a draw: the difference to the next draw, which has none."""
    buffer.append(random)
    return buffer.draw("uniform") - buffer.draw("uniform")


def main() -> dict[str, float]:
    print(f"a draw of {ROWS} rows of {TOKENS} tokens, from {SMALL:,} rows and from {LARGE:,}, medians")
    place = next((each for each in ("/dev/shm", tempfile.gettempdir()) if _free(each) >= _FREE), None)
    if place is None:
        print(f"  left out: {LARGE:,} rows need {_FREE / 1024**3:.0f} GiB free in /dev/shm or {tempfile.gettempdir()}")
        return {}
    with tempfile.TemporaryDirectory(dir=place) as folder:
        found = measure(Path(folder))
    show(found, GOALS)
    return found


def _free(folder: str) -> int:
    return shutil.disk_usage(folder).free if Path(folder).is_dir() else 0


if __name__ == "__main__":
    main()
