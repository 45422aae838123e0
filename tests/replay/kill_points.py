"""Processes that are killed at every step of what they ask of a database, one step after another."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from replay.databases import Location
from tests.replay.locations import Databases
from tests.replay.postgres_servers import roomy_folder

Work = Callable[[Location, Callable[[], None]], None]
"""Does one thing after another to a database, and tells after each that it returned."""

_STEPS = (
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
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        _work(step, work, location, sending)
    os.close(sending)
    with os.fdopen(receiving) as stream:
        lines = stream.read().splitlines()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return Ended(len(lines), None)
    assert status == 0, "the work failed by itself"
    return Ended(len(lines) - 1, int(lines[-1]))


def _work(step: int | None, work: Work, location: Location, sending: int) -> None:
    passed = 0

    def pass_one(*given: Any) -> None:
        nonlocal passed
        if passed == step:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    try:
        for target, event in _STEPS:
            sa.event.listen(target, event, pass_one)
        work(location, lambda: os.write(sending, b"told\n"))
        os.write(sending, f"{passed}\n".encode())
        os._exit(0)
    except BaseException:  # noqa: BLE001  the tests' own process must not go on twice
        traceback.print_exc(file=sys.stderr)
        os._exit(1)


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
