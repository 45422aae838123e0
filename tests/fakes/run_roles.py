"""A run with all its roles in processes of their own: a learner, an engine and workers."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import yaml

from agentloop.config import RunConfig
from agentloop.config.config_file import to_plain
from agentloop.engines.serving.engine_process import free_port
from replay.errors import ReplayError
from replay.storage.collecting.ticket_records import TicketCounts
from replay.store import ReplayStore
from tests.fakes.processes import Program, processes, stat
from tests.fakes.records import ticket_counts
from tests.fakes.runs import ROOT, buffer_of, layered, run_identity, small_config

ENGINE = ROOT / "tests" / "fakes" / "engine_program.py"
LEARNER, ENGINE_ROLE = "learner", "engine"


def roles_config(folder: Path, model: Path, collection: dict[str, Any], **sections: Any) -> RunConfig:
    """Six iterations that workers collect for; its engine's address is given by `Roles`."""
    defaults: dict[str, Any] = {
        "run": {"iterations": 6},
        "rollout": {"engine": "vllm", "temperature": 0.7, "max_turns": 2, "max_tokens_per_turn": 12},
        "engine": {"urls": ["http://127.0.0.1:1"]},
        "loss": {"fresh": {"anchor": "behavior"}},
        "collection": {"by": "workers", "lease_s": 5, **collection},
    }
    return small_config(folder, model, **layered(defaults, sections))


def engine_executable(folder: Path) -> Path:
    """A program that starts as vLLM does, and is the test server."""
    program = folder / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {ENGINE} "$@"\n')
    program.chmod(0o755)
    return program


class Roles:
    """Every role's process by name."""

    def __init__(self, folder: Path, config: RunConfig, *, engine_words: Sequence[str] = ()) -> None:
        self.folder, self.run = folder, folder / "runs" / f"{config.run.name}-001"
        self.processes: dict[str, Program] = {}
        self.started = Counter[str]()
        self.port = free_port()
        plain = to_plain(config)
        plain["run"]["folder"] = str(folder / "runs")
        plain["rollout"]["engine"] = "vllm"
        plain["engine"]["urls"] = [f"http://127.0.0.1:{self.port}"]
        self._config = folder / "config.yaml"
        self._config.write_text(yaml.safe_dump(plain))
        self._model = config.model.path
        self._vllm = engine_executable(folder)
        self._engine_words = engine_words

    def start(self, role: str) -> None:
        """`learner`, `engine` or the name of a worker; a learner goes on with the run where there is one."""
        if role == LEARNER:
            words = ["train", str(self._config), *(["--resume"] if (self.run / "run.json").exists() else [])]
        elif role == ENGINE_ROLE:
            words = ["engine", str(self._model), "--port", str(self.port)]
            words += ["--run", str(self.run), *self._engine_words]
        else:
            words = ["worker", "--run", str(self.run), "--concurrency", "8"]
        self.started[role] += 1
        self.processes[role] = Program(*words, place={"PYTHONPATH": str(ROOT), "AGENTLOOP_VLLM": str(self._vllm)})

    def printed(self, role: str) -> str:
        return self.processes[role].output

    def kill(self, role: str) -> None:
        """Kill it, as where a machine goes away: no word, no cleaning up."""
        self.processes[role].kill()

    def kill_server(self) -> None:
        """Kill what `agentloop engine` has started, which then ends by itself."""
        for pid in processes(lambda folder: stat(folder)[1] == self.processes[ENGINE_ROLE].id):
            os.kill(pid, signal.SIGKILL)
        self.processes[ENGINE_ROLE].wait()

    def is_running(self, role: str) -> bool:
        return not self.processes[role].ended

    @property
    def has_learned(self) -> bool:
        """The learner is through, or is started again where it has stopped with an error, as a launcher does."""
        if self.is_running(LEARNER):
            return False
        code = self.processes[LEARNER].wait()
        if code:
            self.start(LEARNER)
        return code == 0

    def end(self) -> None:
        for process in self.processes.values():
            process.send(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(timeout_s=20)
            except subprocess.TimeoutExpired:
                process.kill()

    def until(self, holds: Callable[[], bool], *, limit_s: float = 300) -> None:
        """Looks at every finished episode on the way: each is in exactly one place at every moment."""
        end = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < end, {role: self.printed(role)[-2000:] for role in self.processes}
            self.look()
            time.sleep(0.1)

    def until_more(self, count: Callable[[TicketCounts], int], more: int, *, limit_s: float) -> None:
        """Until a count is so much higher than at first, or nothing more is learned."""
        least: list[int] = []

        def holds() -> bool:
            found = self.look()
            if found is not None and not least:
                least.append(count(found) + more)
            return self.has_learned or (found is not None and count(found) >= least[0])

        self.until(holds, limit_s=limit_s)

    def look(self) -> TicketCounts | None:
        """None before there is a run to look at, or while its database is away."""
        if not (self.run / "run.json").exists():
            return None
        try:
            with closing(ReplayStore.open(buffer_of(self.run), read_only=True)) as store:
                found = ticket_counts(store, str(run_identity(self.run).id))
        except ReplayError:
            return None
        assert found.done == found.rows, found
        return found


@contextmanager
def running_roles(roles: Roles, names: Sequence[str]) -> Iterator[Roles]:
    """All of them, until the end of the block."""
    try:
        for name in names:
            roles.start(name)
        yield roles
    finally:
        roles.end()
