"""Stores what is sampled for agents: all that waits at one moment in one transaction, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

from context.tokens.session_nodes import Node
from replay.errors import DatabaseFailed
from replay.storage.sessions import Sessions


@dataclass(frozen=True)
class _Job:
    nodes: Sequence[tuple[str, Node]] = ()
    delivered: Sequence[tuple[str, int]] = ()
    done: Future[None] = field(default_factory=Future)


class NodeWriter:
    """Commits are shared: a disk that takes 10 ms for one takes no longer for thirty."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        """None: the end."""
        self._late: list[tuple[str, int]] = []
        """Replies that were delivered while the database could not store that."""
        self._thread = threading.Thread(target=self._work, name="nodes", daemon=True)
        self._thread.start()

    async def store(self, session: str, nodes: Sequence[Node]) -> None:
        """Returns once the nodes are on disk, or none of them is. Raises what the database raised."""
        job = _Job([(session, node) for node in nodes])
        self._jobs.put(job)
        await asyncio.shield(asyncio.wrap_future(job.done))  # who waits no more takes back nothing

    def delivered(self, session: str, number: int) -> None:
        """Stored at once, which nobody waits for: after a crash before it an equal request is given the same reply."""
        self._jobs.put(_Job(delivered=[(session, number)]))

    def close(self) -> None:
        """Returns once all is stored."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        is_open = True
        while is_open:
            waiting = [self._jobs.get()]
            while not self._jobs.empty():
                waiting.append(self._jobs.get())
            self._store([job for job in waiting if job is not None])
            is_open = None not in waiting

    def _store(self, jobs: Sequence[_Job]) -> None:
        delivered = [*self._late, *(one for job in jobs for one in job.delivered)]
        self._late = []
        try:
            self._sessions.add([one for job in jobs for one in job.nodes], delivered)
        except Exception as error:  # noqa: BLE001  raised where it is waited for
            self._late = delivered
            if len(jobs) > 1 and not isinstance(error, DatabaseFailed):
                for job in jobs:  # one that can't be stored keeps no other from it
                    self._store([job])
                return
            for job in jobs:
                job.done.set_exception(error)
        else:
            for job in jobs:
                job.done.set_result(None)
