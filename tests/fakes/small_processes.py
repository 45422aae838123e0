"""Processes forked from one that holds nothing but what they need.

To fork the tests' own, with torch in it, takes longer than most of what they are made for.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

SMALL = multiprocessing.get_context("forkserver")
SMALL.set_forkserver_preload(["tests.replay.storage.test_kill_points", "sqlalchemy.dialects.sqlite", "psycopg"])


@dataclass
class Child:
    """A process, and all that it says."""

    process: SMALL.Process  # type: ignore[name-defined]  # a context's own class
    _receiving: Connection

    @classmethod
    def start(cls, work: Callable[..., None], *arguments: Any) -> Child:
        """`work` is given a connection, to send through what it says, and the arguments."""
        receiving, sending = SMALL.Pipe(duplex=False)
        process = SMALL.Process(target=work, args=(sending, *arguments))
        process.start()
        sending.close()
        return cls(process, receiving)

    def said(self) -> list[Any]:
        """Waits for the process to end."""
        found = []
        with self._receiving, suppress(EOFError):
            while True:
                found.append(self._receiving.recv())
        self.process.join()
        return found
