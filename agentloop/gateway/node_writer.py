"""Stores what is sampled for agents: all that waits at one moment in one transaction, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

from context.tokens.session_nodes import Node
from replay.storage.sessions import Sessions


@dataclass(frozen=True)
class _Job:
    session: str
    nodes: Sequence[Node]
    done: Future[None] = field(default_factory=Future)


class NodeWriter:
    """Commits are shared: a disk that takes 10 ms for one takes no longer for thirty."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        """None: the end."""
        self._delivered: deque[tuple[str, int]] = deque()
        self._thread = threading.Thread(target=self._work, name="nodes", daemon=True)
        self._thread.start()

    async def store(self, session: str, nodes: Sequence[Node]) -> None:
        """Returns once the nodes are on disk, or none of them is. Raises what the database raised."""
        job = _Job(session, nodes)
        self._jobs.put(job)
        await asyncio.wrap_future(job.done)

    def delivered(self, session: str, number: int) -> None:
        """Stored with what comes next: after a crash an equal request is given the same reply again."""
        self._delivered.append((session, number))

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

    def _store(self, jobs: list[_Job]) -> None:
        delivered = [self._delivered.popleft() for _ in range(len(self._delivered))]
        try:
            self._sessions.add([(job.session, node) for job in jobs for node in job.nodes], delivered)
        except Exception as error:  # noqa: BLE001  raised where it is waited for
            for job in jobs:
                job.done.set_exception(error)
        else:
            for job in jobs:
                job.done.set_result(None)
