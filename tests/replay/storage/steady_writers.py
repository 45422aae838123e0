"""Eight processes that append at an even pace, as collectors do, and measure how long each append takes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from replay import ReplayStore
from replay.storage.databases import Location
from tests.fakes.records import group, policy, run_record, task, trajectory

# Beside threads and a browser, a fork would be none.
SPAWN = multiprocessing.get_context("spawn")
WRITERS = 8
PAUSE_S = 1.0
"""Between the appends of one writer."""


def write(location: Location, number: int, stop: Any, took: Any) -> None:
    """One of the writers: appends until it is told to stop, and tells how long each append took, in seconds."""
    store = ReplayStore.open(location)
    seconds = []
    while not stop.is_set():
        began = time.monotonic()
        store.append([], [], [trajectory(f"{number}-{len(seconds):06d}", member=number)])
        seconds.append(time.monotonic() - began)
        time.sleep(PAUSE_S)
    store.close()
    took.send(seconds)


@dataclass
class Writers:
    seconds: list[float] = field(default_factory=list)


@contextmanager
def writing(location: Location) -> Iterator[Writers]:
    store = ReplayStore.open(location)
    store.add_run(run_record())
    store.add_policy(policy(0))
    store.append([task()], [group()], [])
    store.close()
    done, stop, pipes, processes = Writers(), SPAWN.Event(), [], []
    for number in range(WRITERS):
        receiving, sending = SPAWN.Pipe(duplex=False)
        processes.append(SPAWN.Process(target=write, args=(location, number, stop, sending)))
        processes[-1].start()
        pipes.append(receiving)
    try:
        yield done
    finally:
        stop.set()
    done.seconds = [second for pipe in pipes for second in pipe.recv()]
    for process in processes:
        process.join()
        assert process.exitcode == 0
