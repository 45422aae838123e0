"""Ends a query at its deadline."""

from __future__ import annotations

import sqlite3
import threading
from types import TracebackType

_AGAIN_AFTER_S = 0.02


class Interruption:
    """Within it, what `connection` runs is interrupted once `seconds` are over.

    SQLite forgets an interrupt that comes between two statements, so it is repeated. A progress handler would be a call
    into Python every few instructions, each of which waits for the interpreter's lock.
    """

    def __init__(self, connection: sqlite3.Connection, seconds: float) -> None:
        self.came = False
        """True: the time was over."""
        self._connection = connection
        self._seconds = seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="query deadline", daemon=True)

    def __enter__(self) -> Interruption:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        wait = self._seconds
        while not self._done.wait(wait):
            self.came = True
            self._connection.interrupt()
            wait = _AGAIN_AFTER_S
