"""A run with all its roles in processes of their own: a learner, an engine with its watcher, and workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import yaml

from agentloop.config import RunConfig
from agentloop.config.config_file import to_plain
from replay.errors import ReplayError
from replay.store import ReplayStore
from replay.ticket_records import TicketCounts
from tests.fakes.runs import ROOT, buffer_of, run_identity
from tests.fakes.worker_runs import stop_between_writes
from tests.vllm.server import beside_a_learner, free_port

AGENTLOOP = Path(sys.executable).with_name("agentloop")
ENGINE = ROOT / "tests" / "fakes" / "engine_program.py"
LEARNER, ENGINE_ROLE = "learner", "engine"


def engine_executable(folder: Path) -> Path:
    """A program that starts as vLLM does, and is the test server."""
    program = folder / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {ENGINE} "$@"\n')
    program.chmod(0o755)
    return program


class Roles:
    """Every role's process by name, and what it printed in a file of that name."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        *,
        vllm: Path | None = None,
        engine_words: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`vllm` None: the test server in its place."""
        self.folder = folder
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        self._environment |= environment or {}
        self.run = folder / "runs" / f"{config.run.name}-001"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.started = Counter[str]()
        self.port = free_port()
        plain = to_plain(config)
        plain["run"]["folder"] = str(folder / "runs")
        plain["rollout"]["engine"] = "vllm"
        plain["engine"] |= {"urls": [f"http://127.0.0.1:{self.port}"], "served_model_name": "policy"}
        self._config = folder / "config.yaml"
        self._config.write_text(yaml.safe_dump(plain))
        self._model = config.model.path
        self._vllm = engine_executable(folder) if vllm is None else beside_a_learner(vllm, folder)
        self._engine_words = engine_words

    def start(self, role: str) -> None:
        """`learner`, `engine` or the name of a worker; a learner goes on with the run where there is one.

        A second learner has a name that begins with `learner`.
        """
        if role.startswith(LEARNER):
            words = ["train", str(self._config), *(["--resume"] if (self.run / "run.json").exists() else [])]
        elif role == ENGINE_ROLE:
            words = ["engine", str(self._model), "--vllm", str(self._vllm), "--port", str(self.port)]
            words += ["--run", str(self.run), *self._engine_words]
        else:
            words = ["worker", "--run", str(self.run), "--concurrency", "8"]
        self.started[role] += 1
        with (self.folder / f"{role}.txt").open("ab") as output:
            self.processes[role] = subprocess.Popen(
                [AGENTLOOP, *words], cwd=ROOT, env=self._environment, stdout=output, stderr=output
            )

    def printed(self, role: str) -> str:
        return (self.folder / f"{role}.txt").read_text()

    def kill(self, role: str) -> None:
        """As a machine that goes away: no word, no cleaning up."""
        self.processes[role].kill()
        self.processes[role].wait()

    def kill_server(self) -> None:
        """What the engine's watcher has started: it starts it again."""
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                parent = path.read_text().rpartition(") ")[2].split()[1]
                if int(parent) == self.processes[ENGINE_ROLE].pid:
                    os.kill(int(path.parent.name), signal.SIGKILL)

    def stop(self, role: str) -> None:
        """As a machine that freezes, until `go_on`; it holds no lock of the database."""
        stop_between_writes(self.processes[role].pid, buffer_of(self.run))

    def go_on(self, role: str) -> None:
        self.processes[role].send_signal(signal.SIGCONT)

    def is_running(self, role: str) -> bool:
        return self.processes[role].poll() is None

    @property
    def has_learned(self) -> bool:
        """The learner is through, or is started again where it has stopped with an error, as a launcher does."""
        code = self.processes[LEARNER].poll()
        if code:
            self.start(LEARNER)
        return code == 0

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def until(self, holds: Callable[[], bool], *, limit_s: float = 300) -> None:
        """Looks at every finished episode on the way: each is in exactly one place at every moment."""
        end = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < end, {role: self.printed(role)[-2000:] for role in self.processes}
            self.look()
            time.sleep(0.1)

    def until_done(self, more: int, *, limit_s: float) -> None:
        """Until so many more episodes have ended than at first, or nothing more is learned."""
        self._until_more(lambda found: found.done, more, limit_s)

    def until_learned(self, more: int, *, limit_s: float) -> None:
        """Until so many more episodes are in batches that were learned from."""
        self._until_more(lambda found: found.fresh, more, limit_s)

    def _until_more(self, count: Callable[[TicketCounts], int], more: int, limit_s: float) -> None:
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
                found = store.tickets.counts(str(run_identity(self.run).id))
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
