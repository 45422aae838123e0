"""One learner of a run leads it, or one gateway, for as long as it says so."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from replay.errors import DatabaseFailed, RunReplaced
from replay.store import ReplayStore


class Leadership:
    """The lease of a run's one learner, or gateway, which a thread extends meanwhile."""

    def __init__(self, store: ReplayStore, run: str, place: str, *, lease_s: float) -> None:
        """`place` is this process's alone: whoever led from there before, on this machine, is gone."""
        self._store, self._run, self._lease_s = store, run, lease_s
        self._name = f"{socket.gethostname()}:{place}"
        self._ended = threading.Event()
        self._replaced: RunReplaced | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, this is the run's leader. Raises ReplayError while another one leads, RunReplaced once one does."""
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
