"""A run whose learner is the test, and whose episodes workers collect, or are made up as soon as they are wanted."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agentloop.config import RunConfig
from agentloop.environments import Task
from agentloop.learning.update_stats import UpdateResult
from agentloop.rollouts.collect import Collector
from agentloop.rollouts.trajectories import Collected, CollectedBy
from agentloop.runs.run_folder import create_run_folder
from agentloop.training.collecting.by_workers import WorkerCollection
from agentloop.training.components import Components, build_components
from agentloop.training.loop import Loop
from agentloop.training.loop_state import LoopState
from agentloop.training.train import begin_run
from context.authors import LLM, TEMPLATE
from context.tokens.token_sequence import Segment
from replay.mixing.request import Availability
from replay.records import TaskRecord, Trajectory, group_of
from replay.storage.collecting.ticket_records import EVALUATION, Claim, TicketCounts
from replay.storage.databases import Location
from replay.store import ReplayStore
from tests.fakes.engine_server import EngineServer
from tests.fakes.processes import Program, stat, until
from tests.fakes.records import policy, ticket_counts, tokens, trajectory
from tests.fakes.runs import SilentDisplay, layered, small_config


def worker_config(
    folder: Path, model: Path, server: EngineServer, location: Location, **sections: dict[str, Any]
) -> RunConfig:
    """Batches of 16 episodes, four of each task."""
    path = f"sqlite:///{location}" if isinstance(location, Path) else location
    given: dict[str, dict[str, Any]] = {
        "rollout": {"engine": "vllm", "temperature": 0.7, "max_turns": 2, "max_tokens_per_turn": 12},
        "engine": {"urls": [server.address], "restart_timeout_s": 5},
        "collection": {"by": "workers", "lease_s": 2.0},
        "replay": {"fraction": 0.0, "database": path},
    }
    return small_config(folder, model, **layered(given, sections))


class IssuedRun:
    """What the learner does for its workers, step by step."""

    def __init__(self, components: Components) -> None:
        self.components = components
        self.store: ReplayStore = components.store
        self.id = components.run_id
        self.folder = components.folder.path
        self._collection = WorkerCollection(components, LoopState(), stopped=lambda: False)

    def issue(self, batches: int) -> int:
        """All batches up to this one: how many episodes there are now."""
        self._collection.issue(batches, self.components.generator.policy_version, Availability())
        self._total = self.counts.queued + self.counts.leased + self.counts.done + self.counts.failed
        return self._total

    @property
    def has_ended(self) -> bool:
        return self.counts.done + self.counts.failed == self._total

    def until_ended(self, *workers: WorkerProgram) -> TicketCounts:
        return self.until(lambda counts: counts.done + counts.failed == self._total, *workers)

    def issue_evaluation(self, tasks: int) -> None:
        held_out = self.components.source.held_out(tasks)
        self._collection.issue_groups([(task, 1) for task in held_out], 0, EVALUATION)

    def report_engine(self, **changes: object) -> None:
        """As the learner does, while it publishes."""
        (engine,) = self.store.roles.listed("engine", self.id)
        self.store.roles.report("engine", self.id, engine.id, {**engine.facts, **changes})

    @property
    def counts(self) -> TicketCounts:
        return ticket_counts(self.store, self.id)

    def until(self, condition: Callable[[TicketCounts], bool], *workers: WorkerProgram) -> TicketCounts:
        """The counts, once they are so."""
        found: list[TicketCounts] = []

        def holds() -> bool:
            found.append(self.counts)
            return condition(found[-1])

        until(holds, lambda: f"{found[-1]} and {[worker.output for worker in workers]}")
        return found[-1]


def stop(pid: int) -> None:
    """Returns once none of its threads runs."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all(stat(thread)[0] == "T" for thread in Path(f"/proc/{pid}/task").iterdir()))


def stop_between_writes(pid: int, location: Location) -> None:
    """A file has one writer at a time: one that is stopped in the middle would hold all others up."""
    stop(pid)
    while isinstance(location, Path):
        with closing(sqlite3.connect(location, timeout=0.2, isolation_level=None)) as connection:
            try:
                connection.execute("begin immediate")
                connection.execute("rollback")
                return
            except sqlite3.OperationalError:
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.05)
                stop(pid)


@contextmanager
def issued_run(config: RunConfig) -> Iterator[IssuedRun]:
    """A run that has begun, with version 0 published to its engines."""
    folder = create_run_folder(config)
    components = build_components(folder, SilentDisplay(), checkpoint=None)
    with closing(components):
        begin_run(components, None)
        yield IssuedRun(components)


class WorkerProgram(Program):
    """`agentloop worker`."""

    def __init__(self, run: Path, *options: str, place: Mapping[str, str] | None = None) -> None:
        super().__init__("worker", "--run", run, *options, place=place)


_LONG_S = 600.0


class MadeRun:
    """Steps of a loop, and of the workers that collect for it where it has any."""

    def __init__(self, components: Components, *, seed: int) -> None:
        made = MadeEpisodes(**vars(components.collector))
        self.loop = Loop(replace(components, collector=made), LoopState())
        self._store, self._id = components.store, components.run_id
        self._by_workers = components.config.collection.by == "workers"
        self._random = random.Random(seed)
        self.in_time = 0.3
        """How often workers end episodes before anybody waits for them."""
        self.fails: Callable[[Claim], bool] = lambda claim: False
        """Which episodes end without a row, as those do that end their worker three times."""

    @property
    def version(self) -> int:
        return self.loop.components.generator.policy_version

    @property
    def counts(self) -> TicketCounts:
        return ticket_counts(self._store, self._id)

    def iterate(self) -> None:
        """One iteration of which all is real but the update. Workers end a batch in time, or one that is waited for."""
        loop, iteration = self.loop, self.loop.state.iteration + 1
        if self._by_workers and self._random.random() < self.in_time:
            self.collect(self._random.randrange(24))
        planned = loop.collection.plan(iteration)
        if self._by_workers and planned.plan.groups:
            self.collect(planned.plan.fresh)
        fresh = loop.collection.collect(planned)
        loop.collection.append(fresh)
        batch = loop.draw(planned, fresh)
        loop.commit(iteration, batch, UpdateResult({}, {r.trajectory.id: {} for r in batch.rows}, {}), None)
        self._store.add_policy(policy(iteration, run=self._id))
        self._sample_from(iteration)

    def checkpoint(self) -> Mapping[str, Any]:
        """What a learner remembers of this moment."""
        return deepcopy({"loop": asdict(self.loop.state), "mixer": self.loop.components.mixer.state()})

    def resume(self, checkpoint: Mapping[str, Any]) -> None:
        """As a learner that was started again."""
        components, state = self.loop.components, LoopState.from_values(deepcopy(checkpoint["loop"]))
        components.mixer.load_state(checkpoint["mixer"])
        self._store.resume(self._id, state.iteration)
        self._sample_from(state.iteration)
        self.loop = Loop(components, state)

    def _sample_from(self, version: int) -> None:
        self.loop.components.generator.published(version)  # type: ignore[union-attr]  # both kinds that there are

    def collect(self, count: int) -> None:
        """As a worker that takes no time: the oldest episodes end."""
        claims = self._store.tickets.claim(self._id, "worker", count=count, lease_s=_LONG_S)
        failed = [claim for claim in claims if self.fails(claim)]
        self._store.tickets.fail(failed, "it always fails")
        done = [claim for claim in claims if claim not in failed]
        assert all(self._store.tickets.finish([(claim, self._episode(claim)) for claim in done]))

    def _episode(self, claim: Claim) -> Trajectory:
        ticket = claim.ticket
        by = CollectedBy(ticket.run, ticket.iteration, 0)
        return made_episode(
            by,
            by.id_of("ticket", ticket.number, ticket.member),
            version=self.version,
            group=by.id_of("group", ticket.number),
            task=ticket.task,
            slot=ticket.number * 16 + ticket.member,
            member=ticket.member,
        )


class MadeEpisodes(Collector):
    """What the loop collects: as many episodes as it asks for, made up."""

    def collect(self, groups: Sequence[tuple[Task, int]], collected_by: CollectedBy, **given: Any) -> Collected:
        collected = Collected()
        for number, (task, size) in enumerate(groups):
            hash = self.actors.environments.task_hash(task)
            members = [
                made_episode(
                    collected_by,
                    collected_by.id_of("row", number, member),
                    version=self.actors.generator.policy_version,
                    group=collected_by.id_of("group", number),
                    task=hash,
                    slot=number * 16 + member,
                    member=member,
                    attempt=collected_by.attempt,
                )
                for member in range(size)
            ]
            collected.tasks.append(TaskRecord(hash, self.actors.environments.name, task.payload))
            collected.groups.append(group_of(members))
            collected.trajectories += members
            collected.rewards |= {row.id: row.record.reward for row in members}
        return collected


def made_episode(by: CollectedBy, id: str, *, version: int, **place: Any) -> Trajectory:
    """Two sampled tokens, rewarded by its place in its group."""
    segment = Segment(tokens([5, 6, 7], [TEMPLATE, LLM, LLM], version=version))
    reward = float(place["member"] % 2)
    numbers = {"reward": reward, "success": reward > 0, "advantage": reward - 0.5}
    return trajectory(id, segments=(segment,), run=by.run, iteration=by.iteration, **numbers, **place)


@contextmanager
def made_run(config: RunConfig, *, seed: int = 0) -> Iterator[MadeRun]:
    with issued_run(config) as run:
        yield MadeRun(run.components, seed=seed)
