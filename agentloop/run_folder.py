"""Where a run lives on disk: <run.folder>/<run.name>-001 and what is inside."""

from __future__ import annotations

import fcntl
import json
import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agentloop.config import RunConfig
from agentloop.config_file import load_plain, to_plain
from agentloop.errors import UserError


@dataclass(frozen=True)
class RunFolder:
    path: Path
    run_id: str
    config: RunConfig

    @property
    def database(self) -> Path:
        return self.path / "replay.sqlite"

    @property
    def model(self) -> Path:
        """The tokenizer, and for the built-in model the weights the run began with."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def policies(self) -> Path:
        return self.path / "policies"

    def lock(self) -> IO[str]:
        """Held while a process trains here; released when it ends, however it ends."""
        stream = (self.path / "lock").open("w")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.close()
            raise UserError(
                f"run.folder must be used by one process at a time, got {self.path} which another one is training in. "
                "Wait for it, or start a new run."
            ) from error
        return stream


def create_run_folder(config: RunConfig) -> RunFolder:
    """The next free number under the run's name; earlier runs are never touched."""
    parent = Path(config.run.folder)
    taken = [number for number, _ in _numbered(parent, config.run.name)]
    path = parent / f"{config.run.name}-{max(taken, default=0) + 1:03d}"
    identity = {"id": uuid.uuid4().hex, "name": config.run.name, "config": to_plain(config)}
    try:
        path.mkdir(parents=True)
        unfinished = path / "run.json.unfinished"
        unfinished.write_text(json.dumps(identity, indent=1))
        os.replace(unfinished, path / "run.json")
    except OSError as error:
        raise UserError(
            f"run.folder must be writable, got {error.strerror} at {path}. Choose another with --set run.folder=PATH."
        ) from error
    return open_run_folder(path)


def open_run_folder(path: Path) -> RunFolder:
    """An existing run; the error says what is missing."""
    try:
        identity: dict[str, Any] = json.loads((path / "run.json").read_text())
        return RunFolder(path, identity["id"], load_plain(identity["config"]))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"RUN must be a run folder with a run.json, got {str(path)!r}. See: ls runs") from error


def latest_run_folder(parent: Path, name: str) -> RunFolder:
    """The newest run of that name, for --resume."""
    runs = _numbered(parent, name)
    if not runs:
        raise UserError(
            f"--resume must find a run named {name!r} under {parent}, got none. Start one without --resume."
        )
    return open_run_folder(max(runs)[1])


def _numbered(parent: Path, name: str) -> list[tuple[int, Path]]:
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    matches = [(pattern.fullmatch(path.name), path) for path in parent.glob(f"{name}-*")] if parent.is_dir() else []
    return [(int(match[1]), path) for match, path in matches if match and (path / "run.json").exists()]
