"""What on this machine would spoil a run, found before the run does; what versions packages need, pip sees to."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sqlite3
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import agentloop

OK: Literal["ok"] = "ok"
WARN: Literal["warn"] = "warn"
FAIL: Literal["fail"] = "fail"
_PACKAGES = ("agentloop", "replay", "context")
_DISTRIBUTION = "agentloop-replay"
_GIGABYTE = 1024**3
_LITTLE_DISK = 2 * _GIGABYTE
_NO_DISK = _GIGABYTE // 4
_ENGINE_S = 30.0


@dataclass(frozen=True)
class Check:
    """One answer of the doctor."""

    name: str
    status: Literal["ok", "warn", "fail"]
    """fail: a run can't go well; warn: it can, and something should be known or changed."""
    found: str
    advice: str = ""
    """What to do; empty when nothing is to be done."""


def checks(folder: Path = Path("runs")) -> list[Check]:
    """Every check, for runs that will be kept under `folder`, which need not exist yet."""
    existing = _nearest_existing(folder)
    return [
        check_sqlite(sqlite3.sqlite_version),
        *(check_module(name) for name in _PACKAGES),
        check_device(),
        check_disk(shutil.disk_usage(existing).free, existing),
        check_file_system(existing),
    ]


def check_engine(url: str, key: str | None) -> Check:
    """Whether a policy could be published to the vLLM server at `url`."""
    from agentloop.engines.publish.engine_control import EngineControl
    from agentloop.engines.remote.server_facts import check_version
    from agentloop.errors import UserError

    with EngineControl(url, model="", key=key, timeout_s=_ENGINE_S) as engine:
        if not engine.healthy():
            return Check("engine", FAIL, f"nothing healthy answers at {url}", "Start it: agentloop engine MODEL")
        try:
            check_version(engine.version(), key="--engine", where=url)
            label, adapters = engine.label(), engine.adapters()
        except UserError as error:
            return Check("engine", FAIL, str(error))
    more = f", and {', '.join(adapters)}" if adapters else ""
    return Check("engine", OK, f"{url} serves weights that it calls {label!r}{more}")


def check_sqlite(version: str) -> Check:
    """SQLite's WAL-reset bug: 3.7.0 to 3.51.2, less two fixed branches; https://www.sqlite.org/wal.html"""
    number = _numbers(version)
    fixed = number >= (3, 51, 3) or (3, 50, 7) <= number < (3, 51) or (3, 44, 6) <= number < (3, 45)
    if fixed or number < (3, 7):
        return Check("sqlite", OK, version)
    return Check(
        "sqlite",
        WARN,
        f"{version}, which has the WAL-reset bug",
        "Two processes that write and checkpoint at the same moment can damage a database; very rare. One run "
        "that writes while others read is safe. For several writers use PostgreSQL, or SQLite 3.51.3 (3.50.7, 3.44.6).",
    )


def check_module(name: str) -> Check:
    """Whether `import NAME` gives this package: `context` and `replay` are names others use too."""
    own = Path(agentloop.__file__).resolve().parent.parent / name / "__init__.py"
    spec = importlib.util.find_spec(name)
    origin = Path(spec.origin).resolve() if spec and spec.origin else None
    label = f"module {name}"
    if origin != own:
        found = f"comes from {origin}" if origin else "not found"
        return Check(label, FAIL, found, f"Rename or uninstall that; this program's own is {own.parent}.")
    for local in (Path(f"{name}.py"), Path(name) / "__init__.py"):
        if local.is_file() and local.resolve() != own:
            advice = "Python started in this folder imports that instead. Rename it, or start elsewhere."
            return Check(label, WARN, f"{local.resolve()} has the same name", advice)
    others = sorted(set(importlib.metadata.packages_distributions().get(name, ())) - {_DISTRIBUTION})
    if others:
        advice = f"Whichever was installed last wins. pip uninstall {others[0]}, then install {_DISTRIBUTION} again."
        return Check(label, WARN, f"the distribution {others[0]} has one too", advice)
    return Check(label, OK, str(own.parent))


def check_device() -> Check:
    import torch  # here: it takes seconds, and no other check needs it

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        memory = f"{free / _GIGABYTE:.0f} of {total / _GIGABYTE:.0f} GiB free"
        return Check("device", OK, f"{torch.cuda.get_device_name()}, {memory}")
    return Check("device", OK, f"no GPU; {os.cpu_count()} CPU cores", "Enough for the built-in model.")


def check_disk(free: int, folder: Path) -> Check:
    """Whether runs can be written there."""
    found = f"{free / _GIGABYTE:.1f} GiB free in {folder}"
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = (error.strerror or "refused").lower()
        return Check("disk", FAIL, f"can't write in {folder}: {reason}", "Set run.folder to a folder of yours.")
    if free < _NO_DISK:
        return Check("disk", FAIL, found, "Make room, or set run.folder to another disk.")
    if free < _LITTLE_DISK:
        return Check("disk", WARN, found, "Checkpoints of larger models won't fit; set run.folder to another disk.")
    return Check("disk", OK, found)


def check_file_system(folder: Path) -> Check:
    """SQLite's WAL needs shared memory and locks that network file systems don't give."""
    from replay.storage.databases.disk import network_file_system  # here: another `replay` is found above

    kind = network_file_system(folder)
    if kind is None:
        return Check("file system", OK, f"no network file system known at {folder}")
    advice = "A SQLite buffer is refused there. Set run.folder to a local disk, or replay.database to PostgreSQL."
    return Check("file system", WARN, f"{kind}, a network file system, at {folder}", advice)


def _nearest_existing(folder: Path) -> Path:
    folder = folder.expanduser().absolute()
    return next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0); a part that is no number ends it."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
