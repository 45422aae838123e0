"""A worker: it claims tickets of a run, plays their episodes concurrently, and stores each one once it has ended."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

from agentloop.errors import UserError
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.evaluation import held_out_episode, outcome_of
from agentloop.rollouts.trajectories import CollectedBy, MemberPlace, trajectory_of
from agentloop.runs.signals import StopRequest
from agentloop.workers.episodes_under_way import EpisodeResult, EpisodesUnderWay
from agentloop.workers.joined_run import JoinedRun
from replay.errors import DatabaseFailed, InvalidRecord
from replay.records import HeldOutEpisode, ObservationRecord, Trajectory
from replay.storage.collecting.ticket_records import EVALUATION, MOST_TRIES, Claim, Place, RunView

if TYPE_CHECKING:
    from agentloop.workers.episodes_on_request import EpisodeDesk

_SIGNAL_S = 0.25
_LOOK_S, _LONGEST_LOOK_S = 0.25, 1.0
"""Seconds between two looks at the run; without anything to do they double, up to the longest."""
_LONGEST_BACK_OFF_S = 8.0
_TO_LEAVE_S = 7.0
"""Seconds to store ended episodes and to give the other tickets back."""
_MOST_ERRORS_IN_A_ROW = 8
"""Episodes in a row that an error ended. Then the worker ends: it must not use up the run's tickets."""

_Result = TypeVar("_Result")


class Worker:
    """Looks at its run at intervals. One thread asks the database, so that a slow one delays no episode."""

    def __init__(
        self,
        run: JoinedRun,
        *,
        concurrency: int,
        stop: StopRequest,
        say: Callable[[str], None],
        desk: EpisodeDesk | None = None,
    ) -> None:
        """`desk` hands the episodes to waiting agents; None: the worker plays them itself."""
        self.id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._run = run
        self._concurrency = concurrency
        self._desk = desk
        self._stop = stop
        self._say = say
        self._lease_s = run.config.collection.lease_s
        self._database = ThreadPoolExecutor(1, thread_name_prefix="database")
        self._claims: dict[Place, Claim] = {}
        """The claims of episodes that are unfinished, or not stored yet."""
        self._results: list[EpisodeResult] = []
        """Results that are not stored yet."""
        self._returned: list[Claim] = []
        self._counts: Counter[str] = Counter()
        self._errors: list[str] = []
        """The errors that ended the latest episodes; empty once one ends without an error."""
        self._next_extension = self._next_report = 0.0
        self._pause_s = _LOOK_S
        self._back_off_s = 0.0

    def collect(self) -> None:
        """Collect until the run ends or a signal comes. Raises UserError where this worker can't collect."""
        # Not asyncio.run: at its end it waits for threads, even of tools that never return.
        asyncio.new_event_loop().run_until_complete(self._collect())

    async def _collect(self) -> None:
        self._episodes = EpisodesUnderWay(self._run, None if self._desk is None else self._desk.play)
        roles = self._run.store.roles
        try:
            while not self._stop.requested:
                try:
                    view = await self._ask(lambda: roles.view(self._run.id, lease_s=self._lease_s))
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
        """Do all that is due; return the seconds until the next look."""
        if self._back_off_s:
            self._say("the database answers again")
            self._back_off_s = 0.0
        self._run.engine.use_listed(view.engines)
        await self._store_results()
        if len(self._errors) >= _MOST_ERRORS_IN_A_ROW:
            raise UserError(
                f"episodes must not fail by errors on this worker, got {len(self._errors)} in a row, the last with "
                f"{self._errors[-1]}. Mend that, and start it again."
            )
        await self._extend()
        await self._give_back()
        await self._claim(view)
        if time.monotonic() >= self._next_report:
            await self._ask(self._run.store.roles.report, "worker", self._run.id, self.id, self._facts())
            self._next_report = time.monotonic() + self._lease_s / 3
        busy = self._claims or (view.has_free_tickets and self._run.engine.serves)
        self._pause_s = _LOOK_S if busy else min(2 * self._pause_s, _LONGEST_LOOK_S, self._lease_s / 3)
        return self._pause_s

    async def _store_results(self) -> None:
        for result in self._episodes.results():
            self._results.append(result)
            if result.episode is None:
                self._errors.append(str(result.problem))
            else:
                self._errors.clear()
                self._counts["tool_errors"] += result.episode.num_failed_calls
        stored, memory = list(self._results), self._run.actors.memory
        if stored:
            self._counts += await self._ask(store_results, self._run, stored)
            if memory is not None:
                await self._ask(self._run.store.remember, memory.take_new())
            del self._results[: len(stored)]
            self._drop(result.claim.place for result in stored)

    async def _extend(self) -> None:
        now = time.monotonic()
        if now < self._next_extension:
            return
        if self._claims:
            held = list(self._claims.values())
            lost = await self._ask(lambda: self._run.store.tickets.extend(held, lease_s=self._lease_s))
            # Ended episodes of lost claims are stored all the same: the first result counts.
            self._episodes.cancel(lost)
            self._drop(lost)
        self._next_extension = now + self._lease_s / 3

    async def _claim(self, view: RunView) -> None:
        count = 0 if any(map(_is_last_try, self._claims.values())) else self._concurrency - len(self._claims)
        count = count if self._desk is None else min(count, self._desk.waiting)
        if not count or not view.has_free_tickets or not self._run.engine.serves:
            return
        claims, known = await self._ask(self._claim_tickets, count)
        if self._claims and any(map(_is_last_try, claims)):  # if it ends this worker, no other ticket loses a try
            self._returned += claims
            claims = []
        self._claims |= {claim.place: claim for claim in claims}
        if self._run.actors.memory is not None:
            self._run.actors.memory.keep([claim.ticket.task for claim in self._claims.values()])
            self._run.actors.memory.add(known)
        tasks = await self._ask(self._run.tasks.tasks_for, [claim.ticket for claim in claims])
        for claim, task in zip(claims, tasks, strict=True):
            self._episodes.start(claim, task)
        # At once, because an episode could end this process.
        await self._give_back()

    def _claim_tickets(self, count: int) -> tuple[list[Claim], list[ObservationRecord]]:
        """Claim tickets; return them with the remembered observations of their tasks' tools."""
        run, memory = self._run, self._run.actors.memory
        claims = run.store.tickets.claim(run.id, self.id, count=count, lease_s=self._lease_s)
        tasks = [claim.ticket.task for claim in claims]
        environments = () if memory is None else memory.environments
        known = [record for environment in environments for record in run.store.remembered(environment, tasks)]
        return claims, known

    def _drop(self, places: Iterable[Place]) -> None:
        """Drop claims that have ended, or that another worker has."""
        for place in places:
            self._claims.pop(place, None)

    async def _give_back(self) -> None:
        if self._returned:
            await self._ask(self._run.store.tickets.give_back, list(self._returned))
            self._returned.clear()

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
            "state": "collecting" if self._claims else "waiting",
        }

    async def _leave(self) -> None:
        """Store ended episodes, give the other tickets back, and sign off, as far as a few seconds allow."""
        try:
            async with asyncio.timeout(_TO_LEAVE_S):
                await self._episodes.end()
                await self._store_results()
                self._returned += self._claims.values()
                await self._give_back()
                await self._ask(self._run.store.roles.leave, "worker", self._run.id, self.id)
        except (TimeoutError, DatabaseFailed) as error:
            reason = str(error) or f"{_TO_LEAVE_S:g} s were over"
            self._say(f"{len(self._claims)} tickets stay claimed until their leases end: {reason}")
        self._say(f"left: {self._counts['done']} episodes stored, {self._counts['failed']} failed")

    def _wait_for_database(self, error: DatabaseFailed) -> float:
        if not self._back_off_s:
            self._say(f"waiting for the database, with ended episodes in memory: {error}")
        self._back_off_s = min(max(2 * self._back_off_s, 0.5), _LONGEST_BACK_OFF_S)
        return self._back_off_s

    async def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stop.requested and (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _SIGNAL_S))

    async def _ask(self, question: Callable[..., _Result], *args: Any) -> _Result:
        """Ask the database, in the one thread that does."""
        return await asyncio.get_running_loop().run_in_executor(self._database, question, *args)


def _is_last_try(claim: Claim) -> bool:
    return claim.tries >= MOST_TRIES


def store_results(run: JoinedRun, results: Sequence[EpisodeResult]) -> Counter[str]:
    """Store results; count the `done` and the `failed`. After an error it may be repeated: a result counts once."""
    counts: Counter[str] = Counter()
    rows = []
    for result in results:
        if result.problem is not None:
            counts["failed"] += _fail(run, result.claim, result.problem)
        elif result.claim.ticket.purpose == EVALUATION:
            assert result.episode is not None  # only a problem has none
            outcome = asdict(outcome_of(result.episode, run.config))
            kept = _make_held_out(run, result.claim, result.episode) if run.config.evaluation.keep_episodes else None
            counts["done"] += run.store.tickets.finish_evaluation(result.claim, outcome, kept)
        else:
            rows.append((result.claim, make_row(run, result)))
    return counts + _finish(run, rows)


def _make_held_out(run: JoinedRun, claim: Claim, episode: Episode) -> HeldOutEpisode:
    ticket = claim.ticket
    number = ticket.number * run.config.evaluation.samples + ticket.member
    return held_out_episode(run.actors, episode, run.config, run=ticket.run, iteration=ticket.iteration, number=number)


def _finish(run: JoinedRun, rows: list[tuple[Claim, Trajectory]]) -> Counter[str]:
    try:
        return Counter(done=sum(run.store.tickets.finish(rows)))
    except InvalidRecord as error:
        if len(rows) == 1:
            return Counter(failed=_fail(run, rows[0][0], str(error)))
    # One row can't be stored: store the others.
    return sum((_finish(run, [row]) for row in rows), Counter[str]())


def _fail(run: JoinedRun, claim: Claim, problem: str) -> int:
    return int(claim.place not in run.store.tickets.fail([claim], problem))


def make_row(run: JoinedRun, result: EpisodeResult) -> Trajectory:
    """Make a result's trajectory. Its ids follow from its ticket's place; the learner computes its advantage later."""
    assert result.episode is not None  # only a problem has none
    ticket = result.claim.ticket
    by = CollectedBy(ticket.run, ticket.iteration, attempt=0)
    place = MemberPlace(
        id=by.id_of("ticket", ticket.number, ticket.member),
        group=by.id_of("group", ticket.number),
        task=ticket.task,
        slot=ticket.number * run.config.batch.group_size + ticket.member,
        member=ticket.member,
    )
    return trajectory_of(run.actors, result.episode, result.reward, by, place, run.config)
