"""A run whose learner is the test: it issues tickets and publishes, and workers in processes of their own collect."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from agentloop.config import RunConfig
from agentloop.runs.run_folder import create_run_folder
from agentloop.training.collecting.issued_batches import IssuedBatches, issue_groups
from agentloop.training.components import Components, build_components
from agentloop.training.loop_state import LoopState
from agentloop.training.train import begin_run
from replay.mixing.request import Availability
from replay.storage.databases import Location
from replay.store import ReplayStore
from replay.ticket_records import EVALUATION, TicketCounts
from tests.fakes.engine_server import EngineServer
from tests.fakes.runs import ROOT, SilentDisplay, small_config

LIMIT_S = 60.0


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
    merged = {name: {**given.get(name, {}), **sections.get(name, {})} for name in {*given, *sections}}
    return small_config(folder, model, **merged)


class IssuedRun:
    """What the learner does for its workers, step by step."""

    def __init__(self, components: Components) -> None:
        self.components = components
        self.store: ReplayStore = components.store
        self.id = components.run_id
        self.folder = components.folder.path
        self._batches = IssuedBatches(components, LoopState())

    def issue(self, batches: int) -> int:
        """All batches up to this one: how many episodes there are now."""
        self._batches.issue(batches, self.components.generator.policy_version, Availability())
        self._total = self.counts.queued + self.counts.leased + self.counts.done + self.counts.failed
        return self._total

    @property
    def has_ended(self) -> bool:
        return self.counts.done + self.counts.failed == self._total

    def until_ended(self, *workers: WorkerProgram) -> TicketCounts:
        return self.until(lambda counts: counts.done + counts.failed == self._total, *workers)

    def issue_evaluation(self, tasks: int) -> None:
        held_out = self.components.source.held_out(tasks)
        issue_groups(self.components, [(task, 1) for task in held_out], 0, EVALUATION)

    def report_engine(self, **changes: object) -> None:
        """As the learner does, while it publishes."""
        (engine,) = self.store.roles.listed("engine", self.id)
        self.store.roles.report("engine", self.id, engine.id, {**engine.facts, **changes})

    @property
    def counts(self) -> TicketCounts:
        return self.store.tickets.counts(self.id)

    def until(self, condition: Callable[[TicketCounts], bool], *workers: WorkerProgram) -> TicketCounts:
        """The counts, once they are so."""
        deadline = time.monotonic() + LIMIT_S
        while not condition(counts := self.counts):
            said = [worker.lines for worker in workers]
            assert time.monotonic() < deadline, f"{counts} and {said}"
            time.sleep(0.02)
        return counts


def stop(pid: int) -> None:
    """Returns once none of its threads runs."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + LIMIT_S
    while any(path.read_text().rpartition(") ")[2][0] != "T" for path in Path(f"/proc/{pid}/task").glob("*/stat")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


class WorkerProgram:
    """One `agentloop worker` process and the lines it has printed so far."""

    def __init__(self, run: Path, *options: str, place: Mapping[str, str] | None = None) -> None:
        """`place`: further environment variables."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(place or {})}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agentloop", "worker", "--run", run, *options],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(iter(self._process.stdout.readline, ""))

    def __enter__(self) -> WorkerProgram:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self.wait()

    @property
    def id(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def says(self, text: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while text not in self.output:
            assert time.monotonic() < deadline and self._reader.is_alive(), f"never said {text!r}: {self.output}"
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """The exit code."""
        code = self._process.wait(LIMIT_S)
        self._reader.join()
        return code
