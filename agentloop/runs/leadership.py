"""One process at a time leads a run, or a gateway's recording, as long as it renews its lease."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from replay.errors import DatabaseFailed, RunReplaced
from replay.store import ReplayStore


class Leadership:
    """The lease of a run's one learner or gateway. A thread extends it."""

    def __init__(self, store: ReplayStore, run: str, place: str, *, lease_s: float) -> None:
        """Only one process at a time uses `place`, so an earlier leader from there, on this machine, is gone."""
        self._store, self._run, self._lease_s = store, run, lease_s
        self._name = f"{socket.gethostname()}:{place}"
        self._ended = threading.Event()
        self._replaced: RunReplaced | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lead the run within the block. Raises ReplayError if another process leads, RunReplaced if one takes over."""
        self._store.roles.lead(self._run, self._name, lease_s=self._lease_s)
        # Only a leader may reopen the run: workers of a run that has ended must leave it.
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
                # This process is stopped as by a person; the database refuses all further writes anyhow.
                os.kill(os.getpid(), signal.SIGTERM)
                return
            except DatabaseFailed:
                # The database may be away for a moment; the next write finds out who leads.
                continue
