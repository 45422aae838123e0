"""Stores what is sampled for agents: all that waits at one moment in one transaction, in a thread of its own."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeVar

from context.tokens.session_nodes import Node
from replay.errors import DatabaseFailed
from replay.storage.sessions import Sessions

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Job:
    nodes: Sequence[tuple[str, Node]] = ()
    delivered: Sequence[tuple[str, int]] = ()
    done: Future[None] = field(default_factory=Future)


class NodeWriter:
    """Commits are shared: a disk that takes 10 ms for one takes no longer for thirty."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._late: list[tuple[str, int]] = []
        """Replies that were delivered while the database could not store that."""
        self._thread = ThreadPoolExecutor(1, "nodes")

    async def store(self, session: str, nodes: Sequence[Node]) -> None:
        """Returns once the nodes are on disk, or none of them is. Raises what the database raised."""
        job = _Job([(session, node) for node in nodes])
        self._put(job)
        await asyncio.shield(asyncio.wrap_future(job.done))  # who waits no more takes back nothing

    def delivered(self, session: str, number: int) -> None:
        """Stored at once, which nobody waits for: after a crash before it an equal request is given the same reply."""
        self._put(_Job(delivered=[(session, number)]))

    async def between(self, work: Callable[[], Result]) -> Result:
        """What other work with the database returns, done behind all that was put here before: alone, so that neither
        waits for the other's locks."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Returns once all is stored."""
        self._thread.shutdown()

    def _put(self, job: _Job) -> None:
        self._jobs.put(job)
        self._thread.submit(self._store_waiting)

    def _store_waiting(self) -> None:
        waiting = []
        while not self._jobs.empty():
            waiting.append(self._jobs.get())
        if waiting:
            self._store(waiting)

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
