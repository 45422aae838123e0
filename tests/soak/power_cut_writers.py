"""A program whose writes are recorded: it says what is stored as soon as that is acknowledged.

`python -m tests.soak.power_cut_writers append|learn FILE`
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import sqlalchemy as sa

from replay import ReplayStore
from replay.sampling.samplers import make_sampler
from tests.fakes.records import iterate, new_store, trajectory
from tests.replay.storage.writers import begin

WRITERS = 3
ROUNDS = 4
"""A writer closes the file after each, and opens it again."""
EACH = 4
ITERATIONS = 8
PAGES = 60
"""In the log when it is moved into the file: it is filled and emptied several times."""


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def small_log(connection: sa.PoolProxiedConnection, record: object) -> None:
    connection.execute(f"pragma wal_autocheckpoint={PAGES}")


def create(path: Path) -> None:
    """The library's own writes make the file, not a copy's."""
    ReplayStore.create(path).close()


def append(path: Path) -> None:
    create(path)
    begin(path)
    say("begun")
    with get_context("fork").Pool(WRITERS) as pool:
        pool.starmap(append_some, [(path, number) for number in range(WRITERS)])


def append_some(path: Path, writer: int) -> None:
    for number in range(ROUNDS):
        with closing(ReplayStore.open(path)) as store:
            for each in range(EACH):
                id = f"{writer}-{number}-{each}"
                store.append([], [], [trajectory(id)])
                say(f"stored {id}")


def learn(path: Path) -> None:
    create(path)
    with closing(new_store(path)) as store:
        say("begun")
        for iteration in range(1, ITERATIONS + 1):
            iterate(store, iteration, make_sampler("uniform", iteration))
            say(f"committed {iteration}")


if __name__ == "__main__":
    sa.event.listen(sa.Pool, "connect", small_log)
    {"append": append, "learn": learn}[sys.argv[1]](Path(sys.argv[2]))
