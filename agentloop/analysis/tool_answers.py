"""Do tools that are declared deterministic answer as they did? Remembered calls are made again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agentloop.config import RunConfig
from agentloop.environments import EnvironmentFactory, RunEnvironments, Task, ToolLimits, call_tool
from agentloop.environments.tools.worker_threads import WorkerThreads, run_coroutine, warn_of_close
from agentloop.rollouts.episodes.hooks import EpisodeHooks
from agentloop.rollouts.stored.stored_episodes import StoredEpisodes
from context.messages import ToolCall
from replay import questions
from replay.records import ObservationRecord
from replay.store import ReplayStore


@dataclass
class ToolCheck:
    """What came of making remembered calls again."""

    calls: int = 0
    """Calls that were made again."""
    differing: list[str] = field(default_factory=list)
    """A line for each of them that was answered otherwise."""


def check_tools(store: ReplayStore, environments: RunEnvironments, config: RunConfig, *, calls: int) -> ToolCheck:
    """At least `calls` remembered calls of each environment, of random tasks, each after the calls that it came after.

    Calls are made in a new instance that was started with their task, whose prompt is that of one of its trajectories.
    """
    found = ToolCheck()
    for factory in environments.all:
        _check_environment(store, factory, config, found, most=found.calls + calls)
    return found


def _check_environment(
    store: ReplayStore, factory: EnvironmentFactory, config: RunConfig, found: ToolCheck, *, most: int
) -> None:
    environment = factory.tools_hash(config.rollout.tool_output_chars)
    tasks = store.remembered_tasks(environment)
    for task in random.Random(0).sample(tasks, len(tasks)):
        if found.calls >= most:
            break
        asked = _task(store, factory, task)
        if asked is None:
            continue
        for chain in _chains(store.remembered(environment, [task])):
            found.calls += len(chain)
            found.differing += run_coroutine(_made_again(factory, config, asked, chain))


def _task(store: ReplayStore, factory: EnvironmentFactory, hash: str) -> Task | None:
    """None where no trajectory of it can be read."""
    listed = questions.task(store, hash, limit=1)["trajectories"]
    rows = store.read([row["id"] for row in listed])
    episode = next(iter(StoredEpisodes(RunEnvironments.of_one(factory), store).of(rows)), None)
    return None if episode is None else episode.task


def _chains(records: Sequence[ObservationRecord]) -> Iterator[list[ObservationRecord]]:
    """Calls in the order they were made: each chain ends with one that no other came after.

    Those that came after a record which is damaged, and so is not here, can't be made again.
    """
    by_id, parents = {record.id: record for record in records}, {record.parent for record in records}
    for record in records:
        if record.id not in parents:
            chain = [record]
            while (before := by_id.get(chain[0].parent or "")) is not None:
                chain.insert(0, before)
            if chain[0].parent is None:
                yield chain


async def _made_again(
    factory: EnvironmentFactory, config: RunConfig, task: Task, chain: Sequence[ObservationRecord]
) -> list[str]:
    limits = ToolLimits(config.rollout.tool_timeout_s, config.rollout.tool_output_chars)
    environment, threads = factory.create(), WorkerThreads(1)
    hooks = EpisodeHooks(environment, task, threads, config.rollout, advice="Mend it.")
    differing: list[str] = []
    try:
        await hooks.start()
        for record in chain:
            call = ToolCall(record.tool, record.arguments)
            result = await call_tool(environment, call, limits, threads)
            if result.content != record.content:
                arguments = ", ".join(f"{name}={value!r}" for name, value in record.arguments.items())
                differing.append(
                    f"task {record.task[:12]}: {record.tool}({arguments}) answered {record.content!r:.200}, "
                    f"and now {result.content!r:.200}"
                )
    finally:
        problem = await hooks.close()
        threads.close()
        if problem is not None:
            warn_of_close(factory.where, problem)
    return differing
