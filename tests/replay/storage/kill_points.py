"""Processes that are killed at every step of what they ask of a database, one step after another."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from replay.storage.databases import Location
from tests.fakes.databases import Databases
from tests.fakes.postgres_servers import roomy_folder
from tests.fakes.small_processes import SMALL

Work = Callable[[Location, Callable[[], None]], None]
"""Does one thing after another to a database, and tells after each that it returned."""

STEPS = (
    (sa.Engine, "after_cursor_execute"),  # Nothing happens between this and the next statement.
    (sa.Engine, "commit"),
    (sa.Pool, "checkin"),  # When a connection is given back, its commit has been answered.
)


@dataclass(frozen=True)
class Ended:
    """How a process did."""

    told: int
    """Things that returned."""
    steps: int | None
    """That its work takes; None: it was killed before its end."""


def killed_at(step: int | None, work: Work, location: Location) -> Ended:
    """The work in a process of its own, killed with -9 when it comes to that step; None: never."""
    receiving, sending = SMALL.Pipe(duplex=False)
    child = SMALL.Process(target=_work, args=(step, work, location, sending))
    child.start()
    sending.close()
    told = []
    with receiving, suppress(EOFError):
        while True:
            told.append(receiving.recv())
    child.join()
    if child.exitcode == -signal.SIGKILL:
        return Ended(len(told), None)
    assert child.exitcode == 0, "the work failed by itself"
    return Ended(len(told) - 1, told[-1])


def _work(step: int | None, work: Work, location: Location, sending: Connection) -> None:
    gc.disable()  # A look at all that was imported would take as long as the work.
    passed = 0

    def pass_one(*given: Any) -> None:
        nonlocal passed
        if passed == step:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    for target, event in STEPS:
        sa.event.listen(target, event, pass_one)
    work(location, lambda: sending.send(None))
    sending.send(passed)


class Copies:
    """Databases like a prepared one, a new one for every kill."""

    def __init__(self, databases: Databases, folder: Path, *, empty: bool) -> None:
        self._databases = databases
        self._folder = folder
        self._made = 0
        self.prepared: Location = databases.new(folder / "prepared.sqlite", empty=empty)

    def new(self) -> Location:
        self._made += 1
        if not isinstance(self.prepared, Path):
            name = sa.make_url(self.prepared).database
            server = self._databases.server
            return server.url(server.new_database(empty=True, options=f"template {name}"))
        path = self._folder / f"{self._made}.sqlite"
        shutil.copyfile(self.prepared, path)
        return path

    def drop(self, location: Location) -> None:
        if not isinstance(location, Path):
            self._databases.server.drop(str(sa.make_url(location).database))
            return
        for file in self._folder.glob(f"{location.name}*"):
            file.unlink()


@contextmanager
def copies(databases: Databases, *, empty: bool = False) -> Iterator[Copies]:
    """`empty`: the prepared one has no tables yet."""
    with tempfile.TemporaryDirectory(prefix="agentloop-kill-", dir=roomy_folder()) as folder:
        yield Copies(databases, Path(folder), empty=empty)
