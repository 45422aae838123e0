"""Stores agents' replies in a thread of its own; all that wait at the same moment share one transaction."""

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
    """Writes nodes of all sessions. Thirty that share a commit take no longer than one, 10 ms on some disks."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._unstored_deliveries: list[tuple[str, int]] = []
        """Deliveries that the database could not store yet."""
        self._thread = ThreadPoolExecutor(1, "nodes")

    async def store(self, session: str, nodes: Sequence[Node]) -> None:
        """Store the nodes, all or none; return once they are on disk. Raises what the database raised."""
        job = _Job([(session, node) for node in nodes])
        self._put(job)
        await asyncio.shield(asyncio.wrap_future(job.done))  # a caller that is cancelled cancels no write

    def store_delivery(self, session: str, number: int) -> None:
        """Store soon that a reply was delivered. After a crash before it, an equal request receives the same reply."""
        self._put(_Job(delivered=[(session, number)]))

    async def run_in_turn(self, work: Callable[[], Result]) -> Result:
        """Do other work with the database after all earlier writes, and return its result. It runs in the same thread,
        so that neither waits for the other's locks."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Stop; return once all is stored."""
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
        delivered = [*self._unstored_deliveries, *(one for job in jobs for one in job.delivered)]
        self._unstored_deliveries = []
        try:
            self._sessions.add([one for job in jobs for one in job.nodes], delivered)
        except Exception as error:  # noqa: BLE001  raised for the caller that waits
            self._unstored_deliveries = delivered
            if len(jobs) > 1 and not isinstance(error, DatabaseFailed):
                for job in jobs:  # a job that can't be stored holds up no other
                    self._store([job])
                return
            for job in jobs:
                job.done.set_exception(error)
        else:
            for job in jobs:
                job.done.set_result(None)
