"""`agentloop launch` in a process of its own, with small commands as roles."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from agentloop.launch.supervised_role import MARK
from tests.fakes.runs import ROOT

LIMIT_S = 60.0

RECORDER = """
import os, pathlib, signal, sys, time
run, name = pathlib.Path(sys.argv[1]), sys.argv[2]
with open(run / f"{name}.starts", "a") as file:
    file.write(f"{os.getpid()}\\n")
def leave(number, frame):
    (run / f"{name}.left").write_text("asked")
    sys.exit(0 if name.startswith("worker") else 143)
signal.signal(signal.SIGTERM, leave)
print(f"{name} is up", flush=True)
"""
"""Writes down each of its starts, and that it was asked to leave."""
STAYS = RECORDER + "time.sleep(600)\n"
ENDS_WHEN_THERE_IS_A_FILE = RECORDER + "\nwhile not (run / 'end').exists(): time.sleep(0.05)\n"


def words(code: str, name: str, *more: str) -> list[str]:
    """The command of a role."""
    return [sys.executable, "-c", code, "{run}", name, *more]


def write_roles(folder: Path, roles: Mapping[str, Any], **keys: Any) -> Path:
    """A file of roles beside a configuration whose runs are made in `folder`/runs."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"run": {"name": "small", "folder": str(folder / "runs")}}))
    file = folder / "roles.yaml"
    file.write_text(yaml.safe_dump({"config": str(config), "roles": dict(roles), **keys}))
    return file


class Launch:
    """One `agentloop launch` and what it prints."""

    def __init__(self, file: Path, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self.output = file.with_suffix(".output")
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agentloop", "launch", str(file), *options],
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def id(self) -> int:
        return self._process.pid

    @property
    def printed(self) -> str:
        return self.output.read_text()

    @property
    def run(self) -> Path:
        """The folder of the run, once it was printed."""
        until(lambda: "run folder: " in self.printed or self._process.poll() is not None, self.printed)
        found = re.search(r"run folder: (.*)", self.printed)
        assert found, self.printed
        return Path(found[1])

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        try:
            return self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.printed) from None

    def end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.terminate()
            self._process.wait(LIMIT_S)
        self._process.kill()
        self._process.wait()


@contextmanager
def launched(file: Path, *options: str, environment: Mapping[str, str] | None = None) -> Iterator[Launch]:
    """A launch that has ended when this has."""
    launch = Launch(file, *options, environment=environment)
    try:
        yield launch
    finally:
        launch.end()


def until(condition: Callable[[], bool], otherwise: str = "") -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def starts(run: Path, name: str) -> list[int]:
    """The process of each start of a role."""
    file = run / f"{name}.starts"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def left_over(run: Path) -> list[int]:
    """Processes on this machine that a launch of this run has started, or that those have."""
    wanted = f"{MARK}={run.absolute()}:".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if any(entry.startswith(wanted) for entry in path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return found
