"""The episodes that a worker plays at the same time, from their claim to a result that can be stored."""

import asyncio
import itertools
import math
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentloop.environments import Task
from agentloop.environments.tools.worker_threads import WorkerThreads
from agentloop.errors import one_line_with_place, shortened
from agentloop.rollouts.actors import with_gateway
from agentloop.rollouts.episodes.episode import AskAny, Episode
from agentloop.rollouts.episodes.run_episodes import ConcurrentTurns, play_episode
from agentloop.workers.joined_run import JoinedRun
from replay.storage.collecting.ticket_records import EVALUATION, TRAIN, Claim, Place

_TO_END_S = 3.0


@dataclass(frozen=True)
class EpisodeResult:
    claim: Claim
    episode: Episode | None
    """The episode; None where an error ended it."""
    reward: float = math.nan
    problem: str | None = None
    """Why the episode does not count; None where it counts."""


Player = Callable[[Claim, Task, AskAny], Coroutine[Any, Any, Episode]]
"""Plays the episode of a claim; its third argument asks the policy."""


class EpisodesUnderWay:
    """The unfinished episodes of a worker. Those that end at about the same time are scored together."""

    def __init__(self, run: JoinedRun, player: Player | None = None) -> None:
        """Without a `player` the worker plays the episodes itself."""
        self._opened = ExitStack()
        self._player = player or self._play_here
        self._actors = run.actors
        if player is None:
            self._actors = self._opened.enter_context(with_gateway(run.actors, run.config))
        self._run = run
        self._threads = WorkerThreads(run.config.rollout.tool_threads)
        engines = {TRAIN: run.engine, EVALUATION: run.engine.at_temperature(run.config.evaluation.temperature)}
        size = run.actors.vocab_size
        self._turns = {purpose: ConcurrentTurns(engine, vocab_size=size) for purpose, engine in engines.items()}
        self._numbers = itertools.count()
        self._running: dict[Place, asyncio.Task[None]] = {}
        self._unscored: list[tuple[Claim, Episode]] = []
        self._scoring: asyncio.Task[None] | None = None
        self._results: list[EpisodeResult] = []

    def __len__(self) -> int:
        """The number of unfinished episodes."""
        return len(self._running)

    def start(self, claim: Claim, task: Task) -> None:
        """Play the episode of a claim; its place must be free."""
        running = asyncio.ensure_future(self._play(claim, task))
        self._running[claim.place] = running
        running.add_done_callback(partial(self._remove, claim.place))

    def _remove(self, place: Place, task: asyncio.Task[None]) -> None:
        if self._running.get(place) is task:
            del self._running[place]

    def results(self) -> list[EpisodeResult]:
        """Return all results since the last call."""
        if self._scoring is not None and self._scoring.done():
            self._scoring.result()  # raises an error of the scoring
        taken, self._results = self._results, []
        return taken

    def cancel(self, places: Iterable[Place]) -> None:
        """Cancel these episodes, which nobody needs any more."""
        for place in places:
            if place in self._running:
                self._running[place].cancel()

    async def end(self) -> None:
        """Cancel all unfinished episodes, and score the finished ones as far as a few seconds allow."""
        waited = [*self._running.values(), *([] if self._scoring is None else [self._scoring])]
        self.cancel(list(self._running))
        if waited:
            await asyncio.wait(waited, timeout=_TO_END_S)
        self._opened.close()
        self._threads.close()
        await self._run.engine.close()

    async def _play_here(self, claim: Claim, task: Task, ask: AskAny) -> Episode:
        number = next(self._numbers)
        return await play_episode(self._actors, task, self._run.config, ask=ask, number=number, threads=self._threads)

    async def _play(self, claim: Claim, task: Task) -> None:
        run = self._run
        try:
            episode = await self._player(claim, task, self._turns[claim.ticket.purpose].ask)
        except Exception as error:  # noqa: BLE001  it costs this episode, and the learner is given the reason
            problem = shortened(one_line_with_place(error))
            run.actors.warnings.warn(f"an episode failed: {problem}")
            self._results.append(EpisodeResult(claim, None, problem=problem))
            return
        if episode.problem is not None:
            run.actors.warnings.warn(f"episode ended with {episode.stop_reason}: {episode.problem}")
        if episode.failed:
            self._results.append(EpisodeResult(claim, episode, problem=f"{episode.stop_reason}: {episode.problem}"))
            return
        if claim.ticket.purpose == EVALUATION:
            (judged,) = await run.scorer.judge_beside([episode])
            unknown = "reward.functions: no number" if math.isnan(judged.environment_reward) else None
            self._results.append(EpisodeResult(claim, judged, judged.environment_reward, unknown))
            return
        self._unscored.append((claim, episode))
        if self._scoring is None or self._scoring.done():
            self._scoring = asyncio.ensure_future(self._score())

    async def _score(self) -> None:
        while self._unscored:
            batch, self._unscored = self._unscored, []
            scores = await self._run.scorer.score_beside([episode for _, episode in batch])
            judged = [(claim, episode) for (claim, _), episode in zip(batch, scores.episodes, strict=True)]
            for position, ((claim, episode), total) in enumerate(zip(judged, scores.totals, strict=True)):
                problem = None
                if math.isnan(total):
                    judge = episode.stop_reason if episode.failed else "reward.functions"
                    problem = f"{judge}: {shortened(scores.problems.get(position, 'no number'))}"
                    self._run.actors.warnings.warn(problem)
                self._results.append(EpisodeResult(claim, episode, total, problem))
