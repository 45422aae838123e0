"""Runs many episodes at once, and decides which of them wait for one another between their turns."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from agentloop.config import RunConfig
from agentloop.engines import Completion, ConcurrentGenerator, GenerationFailed, GenerationRequest, Generator
from agentloop.engines.generator import SampledTokens, recordable, replies
from agentloop.environments import Task
from agentloop.environments.row_environment import AgentEnvironment
from agentloop.environments.tools.tool_memory import EpisodeTools
from agentloop.environments.tools.worker_threads import WorkerThreads, run_coroutine
from agentloop.rollouts.actors import Actors, with_gateway
from agentloop.rollouts.episodes.agent_episode import play_agent
from agentloop.rollouts.episodes.episode import Ask, AskAny, Episode, EpisodeHooks, Stop, rollout
from context import ContextManager

_MOMENT_S = 0.02
"""Seconds in which requests of agents are gathered, far less than an answer takes."""


@dataclass(frozen=True)
class ConcurrentTurns:
    """Lets each episode continue as soon as its own reply is there."""

    generator: ConcurrentGenerator
    vocab_size: int
    sampled: SampledTokens = field(default_factory=SampledTokens)

    async def ask(self, episode: int, stop: Stop, prompt_ids: Sequence[int], max_new_tokens: int) -> Completion:
        """Get a reply that can be recorded. Raises GenerationFailed."""
        request = GenerationRequest(episode, prompt_ids, max_new_tokens, stop)
        reply = recordable(request, await self.generator.reply(request), vocab_size=self.vocab_size)
        if isinstance(reply, GenerationFailed):
            raise reply
        self.sampled.count += len(reply.token_ids)
        return reply

    def ended(self) -> None: ...


class TogetherTurns:
    """Lets running episodes take turns together, so that samples do not depend on which tool was quicker."""

    def __init__(self, generator: Generator, vocab_size: int, sampled: SampledTokens, *, episodes: int) -> None:
        self._generator, self._vocab_size, self._sampled, self._running = generator, vocab_size, sampled, episodes
        self._waiting: dict[int, tuple[GenerationRequest, asyncio.Future[Completion]]] = {}

    async def ask(self, episode: int, stop: Stop, prompt_ids: Sequence[int], max_new_tokens: int) -> Completion:
        reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[episode] = GenerationRequest(episode, prompt_ids, max_new_tokens, stop, self._sampled), reply
        self._answer_all()
        try:
            return await reply
        finally:
            self._waiting.pop(episode, None)

    def ended(self) -> None:
        """Note that an episode will ask for no further reply."""
        self._running -= 1
        self._answer_all()

    def _answer_all(self) -> None:
        if self._waiting and len(self._waiting) >= self._running:
            self._answer_waiting()

    def _answer_waiting(self) -> None:
        asked = [self._waiting[episode] for episode in sorted(self._waiting)]
        self._waiting.clear()
        given: Sequence[Completion | Exception]
        try:
            given = replies(self._generator, [request for request, _ in asked], vocab_size=self._vocab_size)
        except Exception as error:  # noqa: BLE001  raised again where the replies are awaited
            given = [error] * len(asked)
        for (_, future), reply in zip(asked, given, strict=True):
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)


class GatheredTurns(TogetherTurns):
    """Collects the requests of a moment and answers them together, because agents ask at any time."""

    _timer: asyncio.TimerHandle | None = None

    def _answer_all(self) -> None:
        if self._waiting and len(self._waiting) < self._running:
            self._timer = self._timer or asyncio.get_running_loop().call_later(_MOMENT_S, self._answer_waiting)
        else:
            super()._answer_all()

    def _answer_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            super()._answer_waiting()


Tried = Callable[[Episode], Awaitable[None]]
Progress = Callable[[int, int, Callable[[], int]], None]
"""Called with the numbers of ended and of all episodes, and a function that counts the tokens sampled so far."""


def run_episodes(
    actors: Actors,
    tasks: Sequence[Task],
    config: RunConfig,
    *,
    progress: Progress = lambda *_: None,
    tried: Tried | None = None,
) -> Iterator[Episode]:
    """Run one episode per task, `rollout.parallel` at a time, and yield the episodes in order.

    `tried` is awaited with each ended episode before the others continue, to find mistakes that would fail them all.
    """
    sampled = SampledTokens()

    def show(ended: int) -> None:
        progress(ended, len(tasks), lambda: sampled.count)

    show(0)
    with with_gateway(actors, config) as actors:
        generator, vocab_size = actors.generator, actors.vocab_size
        at_once = len(tasks) if isinstance(generator, ConcurrentGenerator) else config.rollout.parallel
        for start in range(0, len(tasks), max(at_once, 1)):
            chunk = tasks[start : start + at_once]
            ended = partial(lambda before, ended: show(before + ended), start)
            if isinstance(generator, ConcurrentGenerator):
                turns: ConcurrentTurns | TogetherTurns = ConcurrentTurns(generator, vocab_size, sampled)
            else:
                kind = TogetherTurns if actors.gateway is None else GatheredTurns
                turns = kind(generator, vocab_size, sampled, episodes=len(chunk))
            yield from run_coroutine(_run(actors, chunk, config, turns, ended, tried))


async def _run(
    actors: Actors,
    tasks: Sequence[Task],
    config: RunConfig,
    turns: ConcurrentTurns | TogetherTurns,
    progress: Callable[[int], None],
    tried: Tried | None,
) -> list[Episode]:
    threads = WorkerThreads(config.rollout.tool_threads)
    places = asyncio.Semaphore(config.rollout.parallel)
    ended = 0

    async def one(number: int, task: Task) -> Episode:
        nonlocal ended
        async with places:
            episode = await play_episode(actors, task, config, ask=turns.ask, number=number, threads=threads)
            if tried is not None:
                await tried(episode)
            turns.ended()  # not after a failure: then no episode may continue
        ended += 1
        progress(ended)
        return episode

    running = [asyncio.ensure_future(one(number, task)) for number, task in enumerate(tasks)]
    try:
        episodes = await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)  # each still closes its environment
        threads.close()
        if isinstance(actors.generator, ConcurrentGenerator):
            await actors.generator.close()
    for episode in episodes:
        if episode.problem is not None:
            actors.warnings.warn(f"episode ended with {episode.stop_reason}: {episode.problem}")
    return episodes


async def play_episode(
    actors: Actors, task: Task, config: RunConfig, *, ask: AskAny, number: int, threads: WorkerThreads
) -> Episode:
    """Play one episode with a new instance of the environment and a new context; `number` is unique to the episode."""
    factory = actors.environments.factory_for(task)
    environment = factory.create()
    if isinstance(environment, AgentEnvironment):
        assert actors.gateway is not None
        gateway, authors = actors.gateway, actors.authors
        return await play_agent(environment, task, gateway, ask, authors=authors, config=config, threads=threads)
    own = WorkerThreads(1, keeps_thread=True) if environment.one_thread else threads
    hooks = EpisodeHooks(environment, task, own, config.rollout)
    place = factory.task_hash(task), factory.tools_hash(config.rollout.tool_output_chars)
    try:
        with factory.connected(environment) as servers:
            await asyncio.wrap_future(servers)
            tools = EpisodeTools(environment, factory.tool_specs(task), config.rollout, own, actors.memory, place)
            context = new_context(actors, config, task)
            served, own_ask = actors.served, partial(ask, number, ())
            reply: Ask = own_ask if served is None else lambda _, most: served(context.prompt, most)
            episode = await rollout(hooks, context, tools=tools, ask=reply)
    finally:
        if own is not threads:
            own.close()
    if episode.close_problem is not None:
        actors.warnings.warn(
            f"{actors.environments.where}.close must free what an episode holds, got {episode.close_problem} (logged "
            "once, counted in rollout/failed_closes). Mend it.",
            reason="failed close",
        )
    return episode


def new_context(actors: Actors, config: RunConfig, task: Task) -> ContextManager:
    """Make the context of an episode of a task."""
    return ContextManager(
        actors.renderer,
        actors.parser if task.tools is None else actors.parsers(task.tools),
        max_tokens=config.context.max_tokens,
        strategy=actors.strategy,
    )
