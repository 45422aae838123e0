"""How a draw of 64 rows grows with the buffer: from ten thousand rows of 64 tokens to a million.

Draws from both buffers alternate within one run, so that whatever slows the machine slows both; ratios are what to
read. Reading the buffer into memory at first, and following an append of 64 rows, are shown apart; so is the first draw
from the smallest buffer when 50,000 rows of another run stand beside it.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import sqlalchemy as sa

from benchmarks._goals import show
from benchmarks._rows import ROWS, RUN, TASK, add_run, make_trajectory, seconds
from replay import DrawRequest, GroupRecord, Pick, ReplayStore, Trajectory, make_sampler

TOKENS, MEMBERS = 64, 8
SIZES = (10_000, 1_000_000)
SAMPLERS = ("uniform", "recency", "success", "advantage", "freshness")
# Weights stand in a tree of log2(rows) levels: log2(10^6) / log2(10^4) = 19.9 / 13.3 = 1.5.
GOALS = {f"growth_{name}": "<= 1.5" for name in SAMPLERS} | {"first_draw_beside_foreign_rows": "<= 1.1"}
FOREIGN = 50_000
_FREE = 3 * 1024**3
_SEED_ROWS = 1000


def fill(store: ReplayStore, iteration: int, count: int, random: np.random.Generator) -> None:
    """Short rows without messages, in groups of eight."""
    rows = [
        _in_group(make_trajectory(random, iteration=iteration, slot=slot, num_tokens=TOKENS)) for slot in range(count)
    ]
    names = dict.fromkeys(row.record.group for row in rows)
    groups = [GroupRecord(name, RUN, TASK.hash, iteration, MEMBERS, 0.5, 0.5, 0.5) for name in names]
    store.append([TASK], groups, rows)


def _in_group(row: Trajectory) -> Trajectory:
    record = row.record
    group = f"group-{record.iteration}-{record.slot // MEMBERS}"
    return Trajectory(replace(record, group=group, advantage=float(record.slot % 16) - 7.5), row.segments, ())


def multiply(path: Path, size: int, *, run: str = RUN) -> None:
    """Copies of the seed rows, in later iterations: a million of them one by one would take an hour."""
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        for table, id in (("groups", "id"), ("trajectories", "id"), ("segments", "trajectory")):
            columns = [str(row[1]) for row in connection.exec_driver_sql(f"PRAGMA table_info({table})")]
            copied = {
                "run": f"'{run}'",
                id: f"{id} || ' copy {run} ' || n",
                "iteration": "iteration + n",
                "group_id": f"group_id || ' copy {run} ' || n",
                "policy_version_min": "n / 10",
                "policy_version_max": "n / 10",
                # Of what was written; a copy is something else.
                "record_checksum": "NULL",
            }
            values = ", ".join(copied.get(name, name) for name in columns)
            connection.exec_driver_sql(
                f"WITH RECURSIVE copies(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM copies WHERE n < {size // _SEED_ROWS - 1}) "  # noqa: S608, E501
                f"INSERT INTO {table} SELECT {values} FROM copies, {table} WHERE {id} NOT LIKE '%copy%'"
            )
    engine.dispose()


def first_draws(folder: Path, *, rows: int, foreign: int, rounds: int) -> list[float]:
    """Each round's ratio: a process's first draw of 64 with the other run's rows beside its own, over that without."""
    paths = {name: folder / f"{name}.sqlite" for name in ("alone", "beside")}
    for name, path in paths.items():
        store = add_run(ReplayStore.create(path))
        fill(store, 1, _SEED_ROWS, np.random.default_rng(0))
        if name == "beside":
            add_run(store, "other")
            multiply(path, foreign + _SEED_ROWS, run="other")
        multiply(path, rows)
        store.close()
    return [_first_draw(paths["beside"], rows) / _first_draw(paths["alone"], rows) for _ in range(rounds)]


def _first_draw(path: Path, rows: int) -> float:
    store = ReplayStore.open(path)
    newest = rows // _SEED_ROWS + 2
    request = DrawRequest(RUN, newest, newest // 10, (Pick(ROWS),))
    taken = milliseconds(lambda: store.draw(request, make_sampler("uniform", 0)))
    store.resume(RUN, newest - 1)
    store.close()
    return taken


def milliseconds(action: Callable[[], object]) -> float:
    return 1e3 * seconds(action)


def measure(folder: Path, *, sizes: tuple[int, ...], rounds: int) -> dict[str, dict[int, list[float]]]:
    """Milliseconds by what was done and size of the buffer."""
    random = np.random.default_rng(0)
    stores: dict[int, ReplayStore] = {}
    times: dict[str, dict[int, list[float]]] = {}
    for size in sizes:
        path = folder / f"{size}.sqlite"
        with_seed = add_run(ReplayStore.create(path))
        fill(with_seed, 1, _SEED_ROWS, random)
        with_seed.close()
        multiply(path, size)
        stores[size] = ReplayStore.open(path)
    newest = max(sizes) // _SEED_ROWS + 2
    samplers = {name: make_sampler(name, 0) for name in SAMPLERS}
    for name, sampler in samplers.items():
        for size, store in stores.items():
            request = DrawRequest(RUN, newest, newest // 10)
            first = milliseconds(lambda: store.available(request, sampler))  # noqa: B023  called now
            times.setdefault("read all rows" if name == SAMPLERS[0] else f"weigh all rows {name}", {})[size] = [first]
    for turn in range(1, rounds + 1):
        for size, store in stores.items():
            fill(store, newest + turn, ROWS, random)
            request = DrawRequest(RUN, newest + turn + 1, newest // 10, (Pick(ROWS),))
            followed = milliseconds(lambda: store.draw(replace(request, picks=()), samplers["uniform"]))  # noqa: B023
            times.setdefault("follow 64 rows", {}).setdefault(size, []).append(followed)
        for name, sampler in samplers.items():
            for size, store in stores.items():
                request = DrawRequest(RUN, newest + turn + 1, newest // 10, (Pick(ROWS),))
                store.draw(replace(request, picks=()), sampler)
                taken = milliseconds(lambda: store.draw(request, sampler))  # noqa: B023  called now
                times.setdefault(name, {}).setdefault(size, []).append(taken)
                store.resume(RUN, newest + turn)
    for store in stores.values():
        store.close()
    return times


def figures(times: Mapping[str, Mapping[int, list[float]]]) -> dict[str, float]:
    """Medians, in milliseconds, and how each sampler's grows from the smallest buffer to the largest."""
    found: dict[str, float] = {}
    for name, by_size in times.items():
        medians = [statistics.median(each) for each in by_size.values()]
        found |= {f"{name.replace(' ', '_')}_{size}_ms": value for size, value in zip(by_size, medians, strict=True)}
        if name in SAMPLERS:
            found[f"growth_{name}"] = medians[-1] / medians[0]
    return found


def main(rounds: int = 15, sizes: tuple[int, int] = SIZES) -> dict[str, float]:
    small, large = sizes
    print(f"a draw of {ROWS} rows of {TOKENS} tokens from {small:,} and {large:,} rows, {rounds} rounds, medians")
    places = ("/dev/shm", tempfile.gettempdir())
    roomy = [place for place in places if Path(place).is_dir() and shutil.disk_usage(place).free >= _FREE]
    if not roomy:
        print(f"  left out: {large:,} rows need {_FREE / 1024**3:.0f} GiB free in one of {', '.join(places)}")
        return {}
    with tempfile.TemporaryDirectory(dir=roomy[0]) as folder:
        found = figures(measure(Path(folder), sizes=sizes, rounds=rounds))
        ratios = first_draws(Path(folder), rows=small, foreign=FOREIGN, rounds=rounds)
        found["first_draw_beside_foreign_rows"] = statistics.median(ratios)
    show(found, GOALS)
    return found


if __name__ == "__main__":
    main()
