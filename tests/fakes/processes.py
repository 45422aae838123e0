"""`agentloop train` in a process of its own: started, watched step by step, killed; and whether two runs are one."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self

import psycopg
import torch
import yaml
from safetensors.torch import load_file

from agentloop.config import RunConfig
from agentloop.config.config_file import to_plain
from agentloop.runs.run_folder import complete_checkpoints
from tests.fakes.runs import ROOT, buffer_of, rows

AGENTLOOP = Path(sys.executable).with_name("agentloop")
UNTIMED = "name not like 'time/%' and name not like 'speed/%' and name not in ('tools/runs', 'tools/replayed')"
"""Metrics but for what a run cost: an attempt that was killed leaves remembered tool results behind."""


def until(holds: Callable[[], object], otherwise: Callable[[], object] = str, *, limit_s: float = 60.0) -> None:
    """Wait until it holds; `otherwise` says what is shown where it never does."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, otherwise()
        time.sleep(0.02)


def processes(holds: Callable[[Path], bool]) -> list[int]:
    """The processes of this machine whose folder in /proc is so."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is another user's
            if holds(folder):
                found.append(int(folder.name))
    return found


def stat(folder: Path) -> tuple[str, int, int]:
    """The state, the parent and the group of the process in this folder of /proc."""
    state, parent, group = (folder / "stat").read_text().rpartition(") ")[2].split()[:3]
    return state, int(parent), int(group)


class Program:
    """A command of `agentloop` in a process of its own, and the lines that it has printed so far."""

    def __init__(self, *words: str | Path, place: Mapping[str, str] | None = None) -> None:
        """`place`: further environment variables."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agentloop", *words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(place or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.printed: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self._process.stdout, self.printed), (self._process.stderr, self.errors))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, lines: list[str]) -> None:
        for line in iter(stream.readline, ""):
            if line.strip() and "Writing model shards" not in line and "Loading weights" not in line:
                lines.append(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def id(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def ended(self) -> bool:
        return self.exit_code is not None

    @property
    def output(self) -> str:
        return "".join([*self.printed, *self.errors])

    def says(self, text: str, *, times: int = 1, timeout_s: float = 120.0) -> float:
        """Wait until lines have held `text` so often; when that was."""
        deadline = time.monotonic() + timeout_s
        while "".join(self.printed).count(text) < times:
            reads = not self.ended or any(reader.is_alive() for reader in self._readers)
            assert time.monotonic() < deadline and reads, f"never said {text!r}, but {self.output}"
            time.sleep(0.002)
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        """Wait for a moment of `time.monotonic`, or for the end of the process."""
        while time.monotonic() < moment and not self.ended:
            time.sleep(0.002)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end_with(self, number: signal.Signals, *, code: int) -> None:
        """Send the signal that ends it, with that exit code and not one word on stderr."""
        self.send(number)
        assert (self.wait(), self.errors) == (code, [])

    def wait(self, *, timeout_s: float = 300.0) -> int:
        """The exit code, once everything that was printed has been read."""
        code = self._process.wait(timeout_s)
        for reader in self._readers:
            reader.join()
        return code

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def kill_when(self, condition: Callable[[], bool]) -> bool:
        """Let it run a millisecond at a time and kill it in the first pause in which `condition` holds.

        False: it ended before.
        """
        while True:
            self.send(signal.SIGSTOP)
            state = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if state is None or state.si_code != os.CLD_STOPPED:
                self.wait()
                return False
            if condition():
                self.kill()
                return True
            self.send(signal.SIGCONT)
            time.sleep(0.001)


def write_config(config: RunConfig, path: Path) -> Path:
    path.write_text(yaml.safe_dump(to_plain(config)))
    return path


class Training(Program):
    """`agentloop train`."""

    def __init__(self, config: Path, *options: str, mood: str = "", place: Mapping[str, str] | None = None) -> None:
        super().__init__("train", config, *options, place={"AGENTLOOP_TEST_MOOD": mood, **(place or {})})


class Moments:
    """Moments of a run, seen from outside while its process pauses. `every` is its checkpoint interval."""

    def __init__(self, folder: Path, *, every: int) -> None:
        self.folder = folder
        self._every = every

    def number(self, query: str) -> int:
        """0 where there is nothing yet."""
        try:
            ((value,),) = rows(buffer_of(self.folder), query)
        except (sqlite3.OperationalError, psycopg.OperationalError, psycopg.errors.UndefinedTable):
            return 0
        return int(value or 0)

    @property
    def committed(self) -> int:
        return self.number("select max(iteration) from iterations")

    @property
    def saved(self) -> int:
        return max((int(path.name) for path in complete_checkpoints(self.folder / "checkpoints")), default=0)

    def appending(self) -> bool:
        """A write transaction after an iteration was closed and before anything of the next is visible."""
        done = self.committed
        closed = self.number(f"select count(*) from metrics where iteration = {done} and name = 'time/iteration'")
        begun = self.number(f"select count(*) from trajectories where iteration > {done} and state != 'orphaned'")
        return done > 0 and closed == 1 and begun == 0 and self._is_being_written()

    def _is_being_written(self) -> bool:
        with closing(sqlite3.connect(self.folder / "replay.sqlite", timeout=0, isolation_level=None)) as connection:
            try:
                connection.execute("begin immediate")
            except sqlite3.OperationalError:
                return True
            connection.execute("rollback")
            return False

    def committed_unpublished(self) -> bool:
        return self.committed > self.number("select max(version) from policies")

    def published_unsaved(self) -> bool:
        done = self.committed
        due = done > 0 and done % self._every == 0
        return due and self.number("select max(version) from policies") == done > self.saved

    def saving(self) -> bool:
        return any((self.folder / "checkpoints").glob("[0-9]*.unfinished"))


def assert_same_bits(ours: Path, theirs: Path) -> None:
    """Two safetensors files hold the same tensors."""
    first, second = load_file(ours), load_file(theirs)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def assert_same_run(broken: Path, unbroken: Path) -> None:
    """Nothing that was learned, drawn or measured tells the two run folders apart."""
    for query in (
        """select d.iteration, d.slot, d.stream, d.state, t.iteration, t.slot, t.content_hash, d.probability,
           d.staleness, d.advantage, d.drift_mean, d.token_gap_max, d.ess_share, d.approx_kl, d.clip_fraction
           from draws d join trajectories t on t.id = d.trajectory order by d.iteration, d.slot""",
        "select iteration, slot, content_hash from trajectories where state != 'orphaned' order by iteration, slot",
        f"select iteration, name, value from metrics where {UNTIMED} order by iteration, name",
        "select iteration, fresh, replay, fraction, policy_version from iterations order by iteration",
        "select iteration, state from sampler_state order by iteration",
        "select version, checkpoint from policies order by version",
    ):
        assert rows(buffer_of(broken), query) == rows(buffer_of(unbroken), query)
    assert logged(broken) == logged(unbroken)
    assert_same_weights(broken, unbroken)


def assert_same_weights(broken: Path, unbroken: Path) -> None:
    """Every policy, and everything in the last checkpoint."""
    names = sorted(path.name for path in (unbroken / "policies").glob("*"))
    assert sorted(path.name for path in (broken / "policies").glob("*")) == names
    for name in names:
        assert_same_bits(*(run / "policies" / name / "model.safetensors" for run in (broken, unbroken)))
    ours, theirs = (complete_checkpoints(run / "checkpoints")[-1] for run in (broken, unbroken))
    assert ours.name == theirs.name
    for file in ("state/state.safetensors", "random.safetensors", "model/model.safetensors"):
        assert_same_bits(ours / file, theirs / file)
    assert checkpoint_values(ours) == checkpoint_values(theirs)


def checkpoint_values(checkpoint: Path) -> dict[str, Any]:
    """Without what may differ: whose run and rows they are, how often it was resumed, how long it took."""
    values: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    del values["run"], values["loop"]["attempt"]
    return values


def logged(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what it cost."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/", "tools/r"))} for line in lines]


def assert_sound(run: Path, *, iterations: int) -> None:
    """A finished run: the database is whole, nothing is left half done, no orphan was ever used."""
    database = buffer_of(run)
    if isinstance(database, Path):
        assert rows(database, "pragma integrity_check") == [("ok",)]
    assert rows(database, "select distinct state from draws") == [("committed",)]
    used = "select count(*) from draws join trajectories t on t.id = draws.trajectory where t.state = 'orphaned'"
    assert rows(database, used) == [(0,)]
    assert [line["iteration"] for line in logged(run)] == list(range(1, iterations + 1))
    assert list(run.rglob("*.unfinished")) == []
