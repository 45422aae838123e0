"""Many episodes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from agentloop.config import RunConfig
from agentloop.engines import ConcurrentGenerator
from agentloop.environments import Task, ToolLimits
from agentloop.environments.tools.tool_memory import EpisodeTools, TaskMemory
from agentloop.environments.tools.worker_threads import WorkerThreads, run_coroutine
from agentloop.rollouts.actors import Actors
from agentloop.rollouts.episodes.episode import Ask, Episode, rollout
from agentloop.rollouts.episodes.turns import ConcurrentTurns, TogetherTurns, Turns
from context import ContextManager

Progress = Callable[[int, int], None]
"""Called with episodes ended and episodes in all."""


def run_episodes(
    actors: Actors, tasks: Sequence[Task], config: RunConfig, *, progress: Progress = lambda *_: None
) -> Iterator[Episode]:
    """Run one episode per task, `rollout.parallel` at a time; yields them in order.

    With an engine that takes batches they take their turns together, with one elsewhere each goes on by itself.
    """
    parallel, vocab_size = config.rollout.parallel, actors.vocab_size
    if isinstance(actors.generator, ConcurrentGenerator):
        turns = ConcurrentTurns(actors.generator, vocab_size=vocab_size)
        yield from run_coroutine(_run(actors, tasks, config, turns, lambda ended: progress(ended, len(tasks))))
        return
    for start in range(0, len(tasks), parallel):
        chunk = tasks[start : start + parallel]
        ended = partial(_shifted, progress, start, len(tasks))
        together = TogetherTurns(actors.generator, episodes=len(chunk), vocab_size=vocab_size)
        yield from run_coroutine(_run(actors, chunk, config, together, ended))


def _shifted(progress: Progress, before: int, total: int, ended: int) -> None:
    progress(before + ended, total)


async def _run(
    actors: Actors, tasks: Sequence[Task], config: RunConfig, turns: Turns, progress: Callable[[int], None]
) -> list[Episode]:
    threads = WorkerThreads(config.rollout.tool_threads)
    places = asyncio.Semaphore(config.rollout.parallel)
    ended = 0

    async def one(number: int, task: Task) -> Episode:
        nonlocal ended
        async with places:
            try:
                episode = await play_episode(actors, task, config, partial(turns.ask, number), threads)
            finally:
                turns.ended()
        ended += 1
        progress(ended)
        return episode

    running = [asyncio.ensure_future(one(number, task)) for number, task in enumerate(tasks)]
    try:
        episodes = await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)  # each closes its environment yet
        threads.close()
        await turns.close()
    for episode in episodes:
        if episode.problem is not None:
            actors.warnings.warn(f"episode ended with {episode.stop_reason}: {episode.problem}")
    return episodes


async def play_episode(actors: Actors, task: Task, config: RunConfig, ask: Ask, threads: WorkerThreads) -> Episode:
    """One episode of a new instance of the environment, in a context of its own."""
    context = new_context(actors, config)
    factory = actors.environments.of(task)
    environment = factory.create()
    own = WorkerThreads(1) if environment.one_thread else None
    limits = ToolLimits(config.rollout.tool_timeout_s, config.rollout.tool_output_chars)
    memory = None
    if actors.memory is not None:
        memory = TaskMemory(actors.memory, factory.task_hash(task), factory.tools_hash(limits.max_chars))
    try:
        async with factory.connected(environment):
            episode = await rollout(
                environment,
                task,
                context,
                tools=EpisodeTools(environment, limits, own or threads, memory),
                limits=config.rollout,
                ask=ask,
                threads=own or threads,
            )
    finally:
        if own is not None:
            own.close()
    if episode.close_problem is not None:
        actors.warnings.warn(
            f"{actors.environments.where}.close must free what an episode holds, got {episode.close_problem} (said "
            "once, counted in rollout/failed_closes). Mend it.",
            reason="failed close",
        )
    return episode


def new_context(actors: Actors, config: RunConfig) -> ContextManager:
    """For one episode."""
    return ContextManager(
        actors.renderer,
        actors.parser,
        max_tokens=config.context.max_tokens,
        strategy=actors.strategy,
        control=actors.control,
        strict=config.context.strict,
    )
