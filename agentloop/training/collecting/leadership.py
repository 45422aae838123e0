"""One learner leads a run: it says so again and again, and stops when another has taken its place."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replay.errors import DatabaseFailed, RunReplaced
from replay.store import ReplayStore


class Leadership:
    """The lease of one learner, which a thread extends while the learner updates."""

    def __init__(self, store: ReplayStore, run: str, folder: Path, *, lease_s: float) -> None:
        """`folder` is locked by this process: whoever led from there before, on this machine, is gone."""
        self._store = store
        self._run = run
        self._lease_s = lease_s
        self._name = f"{socket.gethostname()}:{folder.resolve()}"
        self._ended = threading.Event()
        self._replaced: RunReplaced | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, this is the run's learner. Raises ReplayError while another one leads, RunReplaced once one does."""
        self._store.roles.lead(self._run, self._name, lease_s=self._lease_s)
        # Not before: workers of a run that has ended must leave it, whoever is refused.
        self._store.roles.end_run(self._run, ended=False)
        thread = threading.Thread(target=self._extend, name="leadership", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            if self._replaced is not None:
                raise self._replaced
        self._store.roles.stop_leading(self._run, self._name)

    def _extend(self) -> None:
        while not self._ended.wait(self._lease_s / 3):
            try:
                self._store.roles.still_leads(self._run, self._name, lease_s=self._lease_s)
            except RunReplaced as error:
                self._replaced = error
                # As a person would ask it to stop: whatever it is about to write is refused anyhow.
                os.kill(os.getpid(), signal.SIGTERM)
                return
            except DatabaseFailed:
                # The database may be away for a moment; who leads is seen at the next write.
                continue
