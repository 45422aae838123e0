"""A worker: claims tickets of a run, runs their episodes side by side, and stores each as soon as it has ended."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, TypeVar

from agentloop.environments.tools.silence import silenced_tools
from agentloop.errors import UserError
from agentloop.runs.signals import StopRequest
from agentloop.workers.episodes_under_way import EpisodeResult, EpisodesUnderWay, Place
from agentloop.workers.joined_run import JoinedRun
from agentloop.workers.listed_engines import ListedEngines
from agentloop.workers.stored_results import store_results
from replay.errors import DatabaseFailed
from replay.ticket_records import Claim, RunView

_LOOK_S = 0.25
_BUSY_LOOKS_A_SECOND = 400
_IDLE_LOOKS_A_SECOND = 100
"""Of all workers of a run together: they share one database."""
_LONGEST_BACK_OFF_S = 8.0
_TO_LEAVE_S = 7.0
"""For storing what has ended and giving the rest back."""
_MOST_ERRORS_IN_A_ROW = 8
"""Episodes that an error ended: a worker on which none goes well must not use up the run's tickets."""

_Result = TypeVar("_Result")


class Worker:
    """Looks at its run again and again. A slow database holds no episode up: one thread asks it."""

    def __init__(self, run: JoinedRun, *, concurrency: int, stop: StopRequest, say: Callable[[str], None]) -> None:
        self.id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._run = run
        self._concurrency = concurrency
        self._stop = stop
        self._say = say
        self._lease_s = run.config.collection.lease_s
        self._database = ThreadPoolExecutor(1, thread_name_prefix="database")
        self._engines = ListedEngines(run.engine)
        self._claims: dict[Place, Claim] = {}
        """Held: under way, or ended and not stored yet."""
        self._results: list[EpisodeResult] = []
        """Ended and not stored yet."""
        self._counts: Counter[str] = Counter()
        self._errors_in_a_row = 0
        self._next_report = self._next_extension = 0.0
        self._back_off_s = 0.0

    def collect(self) -> None:
        """Collect until the run ends or a signal comes. Raises UserError where this worker can't collect."""
        loop = asyncio.new_event_loop()
        with silenced_tools():
            # Not asyncio.run, which waits at its end for tools that never do.
            loop.run_until_complete(self._collect())

    async def _collect(self) -> None:
        self._episodes = EpisodesUnderWay(self._run)
        try:
            while not self._stop.requested:
                try:
                    view = await self._ask(self._run.store.roles.view, self._run.id)
                    if view.has_ended:
                        self._say("the run has ended")
                        return
                    pause = await self._act(view)
                except DatabaseFailed as error:
                    pause = self._wait_for_database(error)
                await self._pause(pause)
        finally:
            await self._leave()

    async def _act(self, view: RunView) -> float:
        """What has to be done now; seconds until the next look."""
        if self._back_off_s:
            self._say("the database answers again")
            self._back_off_s = 0.0
        self._engines.update(view.engines)
        await self._store_results()
        await self._extend()
        await self._claim(view)
        await self._report()
        busy = self._claims or (view.has_free_tickets and self._engines.any_serves)
        looks = _BUSY_LOOKS_A_SECOND if busy else _IDLE_LOOKS_A_SECOND
        return max(_LOOK_S, view.workers / looks)

    async def _store_results(self) -> None:
        for result in self._episodes.results():
            self._results.append(result)
            self._errors_in_a_row = self._errors_in_a_row + 1 if result.episode is None else 0
            if result.episode is not None:
                self._counts["tool_errors"] += result.episode.num_failed_calls
        stored = list(self._results)
        if stored:
            self._counts += await self._ask(store_results, self._run, stored)
            del self._results[: len(stored)]
            for result in stored:
                self._claims.pop(result.claim.place, None)
        if self._errors_in_a_row >= _MOST_ERRORS_IN_A_ROW:
            problem = next(result.problem for result in reversed(stored) if result.episode is None)
            raise UserError(
                f"episodes must not fail by errors on this worker, got {self._errors_in_a_row} in a row, the last with "
                f"{problem}. Mend that, and start it again."
            )

    async def _extend(self) -> None:
        now = time.monotonic()
        if now < self._next_extension:
            return
        if self._claims:
            held = list(self._claims.values())
            lost = await self._ask(lambda: self._run.store.tickets.extend(held, lease_s=self._lease_s))
            # What has ended is stored all the same: it counts if it is first.
            self._episodes.cancel(lost)
            for place in lost:
                self._claims.pop(place, None)
        self._next_extension = now + self._lease_s / 3

    async def _claim(self, view: RunView) -> None:
        count = self._concurrency - len(self._claims)
        if count < 1 or not view.has_free_tickets or not self._engines.any_serves:
            return
        claims = await self._ask(
            lambda: self._run.store.tickets.claim(self._run.id, self.id, count=count, lease_s=self._lease_s)
        )
        self._claims.update({claim.place: claim for claim in claims})
        for claim in claims:
            planned = await self._ask(self._run.tasks.plan, claim.ticket)
            self._episodes.start(claim, self._run.tasks.find(claim.ticket, planned))

    async def _report(self) -> None:
        now = time.monotonic()
        if now >= self._next_report:
            await self._ask(self._run.store.roles.report, "worker", self._run.id, self.id, self._facts())
            self._next_report = now + self._lease_s / 3

    def _facts(self) -> Mapping[str, Any]:
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "concurrency": self._concurrency,
            "in_flight": len(self._episodes),
            "done": self._counts["done"],
            "failed": self._counts["failed"],
            "tool_errors": self._counts["tool_errors"],
            "code_version": version("agentloop-replay"),
            "config_hash": self._run.config_hash,
            "state": "collecting" if self._claims else "waiting",
        }

    async def _leave(self) -> None:
        """Store what has ended, give the rest back, and be forgotten, as far as that takes no time."""
        try:
            async with asyncio.timeout(_TO_LEAVE_S):
                await self._episodes.end()
                await self._store_results()
                held = list(self._claims.values())
                if held:
                    await self._ask(self._run.store.tickets.give_back, held)
                await self._ask(self._run.store.roles.leave, "worker", self._run.id, self.id)
        except (TimeoutError, DatabaseFailed) as error:
            reason = str(error) or f"{_TO_LEAVE_S:g} s were over"
            self._say(f"left {len(self._claims)} tickets to the end of their leases: {reason}")
        self._say(f"left: {self._counts['done']} episodes stored, {self._counts['failed']} failed")

    def _wait_for_database(self, error: DatabaseFailed) -> float:
        if not self._back_off_s:
            self._say(f"waiting for the database, with what has ended in memory: {error}")
        self._back_off_s = min(max(2 * self._back_off_s, 0.5), _LONGEST_BACK_OFF_S)
        return self._back_off_s

    async def _pause(self, seconds: float) -> None:
        """A signal ends it."""
        until = time.monotonic() + seconds
        while not self._stop.requested and (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _LOOK_S))

    async def _ask(self, question: Callable[..., _Result], *args: Any) -> _Result:
        """Asked in the one thread that talks to the database."""
        return await asyncio.get_running_loop().run_in_executor(self._database, question, *args)
