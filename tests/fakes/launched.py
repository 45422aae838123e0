"""`agentloop launch` in a process of its own, with small commands as roles."""

import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from agentloop.launch.supervised_role import MARK
from tests.fakes.processes import Program, processes

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
NAMES = ("learner", "engine-0", "worker-0", "worker-1")


def words(code: str, name: str, *more: str) -> list[str]:
    """The command of a role."""
    return [sys.executable, "-c", code, "{run}", name, *more]


def write_roles(folder: Path, roles: Mapping[str, Any] | None = None, **keys: Any) -> Path:
    """A file of roles beside a configuration whose runs are made in `folder`/runs; `roles` None: those of `NAMES`."""
    roles = roles or {
        "learner": {"command": words(ENDS_WHEN_THERE_IS_A_FILE, "learner")},
        "engine": {"command": words(STAYS, "engine-{index}")},
        "worker": {"count": 2, "command": words(STAYS, "worker-{index}")},
    }
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"run": {"name": "small", "folder": str(folder / "runs")}}))
    file = folder / "roles.yaml"
    file.write_text(yaml.safe_dump({"config": str(config), "roles": dict(roles), **keys}))
    return file


class Launch(Program):
    """One `agentloop launch`, which leaves when its block ends."""

    def __init__(self, file: Path, *options: str | Path, place: Mapping[str, str] | None = None) -> None:
        super().__init__("launch", file, *options, place=place)

    def __exit__(self, *error: object) -> None:
        self.send(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout_s=60)
        super().__exit__(*error)

    @property
    def run(self) -> Path:
        """The folder of the run, once it was printed."""
        self.says("run folder: ")
        found = re.search(r"run folder: (.*)", self.output)
        assert found, self.output
        return Path(found[1])


def starts(run: Path, name: str) -> list[int]:
    """The process of each start of a role."""
    file = run / f"{name}.starts"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def left_over(run: Path, role: str = "") -> list[int]:
    """Processes on this machine that a launch of this run, or a `role` of it, has started, or that those have."""
    wanted = f"{MARK}={run.absolute()}:{role}".encode()
    return processes(lambda folder: wanted in (folder / "environ").read_bytes())
