"""What on this machine would spoil a run, found before the run does."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sqlite3
import sys
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
        check_python(sys.version_info[:3]),
        check_torch(_version_of("torch")),
        check_transformers(_version_of("transformers")),
        check_sqlite(sqlite3.sqlite_version),
        check_postgres(_version_of("psycopg")),
        *(check_module(name) for name in _PACKAGES),
        check_device(),
        check_disk(shutil.disk_usage(existing).free, existing),
        check_writable(existing),
        check_file_system(existing),
    ]


def check_engine(url: str, key: str | None) -> Check:
    """Whether a policy could be published to the vLLM server at `url`."""
    from agentloop.errors import UserError
    from agentloop.generation.publishing.engine_control import EngineControl
    from agentloop.generation.remote.vllm_version import check_version

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


def check_run(run: str) -> Check:
    """What a run waits for: successes, optimizer steps or tools."""
    from replay.pages.regime import regime
    from replay.pages.report import tile_series
    from replay.queries.open_buffer import open_buffer

    with open_buffer(run) as buffer:
        record = buffer.store.run(buffer.own_run)
        found = regime(tile_series(buffer.store, record.id), record.config)
    if found is None:
        return Check("run", OK, f"{record.name} has made no iteration yet")
    return Check("run", OK, f"{record.name} is limited by {found.limit}: {'; '.join(found.facts)}", f"{found.advice}.")


def check_python(version: tuple[int, int, int]) -> Check:
    found = ".".join(map(str, version))
    if version < (3, 11, 0):
        return Check("python", FAIL, found, "Use Python 3.11 or newer.")
    return Check("python", OK, f"{found} on {platform.system()} {platform.machine()}")


def check_torch(version: str | None) -> Check:
    if version is None:
        return Check("torch", FAIL, "not installed", "pip install 'torch>=2.10'")
    if _numbers(version) < (2, 10):
        advice = "Update to 2.10 or newer: older ones can run code from a weights file (CVE-2026-24747)."
        return Check("torch", FAIL, version, advice)
    return Check("torch", OK, version)


def check_transformers(version: str | None) -> Check:
    if version is None:
        return Check("transformers", FAIL, "not installed", "pip install 'transformers>=5.8,<6'")
    if not (5, 8) <= _numbers(version) < (6,):
        return Check("transformers", FAIL, version, "Install a version from 5.8 up to, not including, 6.")
    return Check("transformers", OK, version)


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


def check_postgres(driver: str | None) -> Check:
    if driver is None:
        return Check("postgresql", OK, "no driver", "For a replay.database: pip install 'agentloop-replay[postgres]'")
    if _numbers(driver) < (3, 2):
        return Check("postgresql", FAIL, f"psycopg {driver}", "pip install 'psycopg[binary]>=3.2'")
    return Check("postgresql", OK, f"driver psycopg {driver}")


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
    if importlib.util.find_spec("torch") is None:
        return Check("device", WARN, "unknown without torch")
    import torch  # here: it takes seconds, and no other check needs it

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        memory = f"{free / _GIGABYTE:.0f} of {total / _GIGABYTE:.0f} GiB free"
        return Check("device", OK, f"{torch.cuda.get_device_name()}, {memory}")
    return Check("device", OK, f"no GPU; {os.cpu_count()} CPU cores", "Enough for the built-in model.")


def check_disk(free: int, folder: Path) -> Check:
    found = f"{free / _GIGABYTE:.1f} GiB free in {folder}"
    if free < _NO_DISK:
        return Check("disk", FAIL, found, "Make room, or set run.folder to another disk.")
    if free < _LITTLE_DISK:
        return Check("disk", WARN, found, "Checkpoints of larger models won't fit; set run.folder to another disk.")
    return Check("disk", OK, found)


def check_writable(folder: Path) -> Check:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = (error.strerror or "refused").lower()
        return Check("run folder", FAIL, f"can't write in {folder}: {reason}", "Set run.folder to a folder of yours.")
    return Check("run folder", OK, f"can write in {folder}")


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


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0); a part that is no number ends it."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
