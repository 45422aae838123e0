"""What on this machine would spoil a run, found before the run does; what versions packages need, pip sees to."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple

import agentloop

_PACKAGES = ("agentloop", "replay", "context")
_GIGABYTE = 1024**3
_LITTLE_DISK = 2 * _GIGABYTE
_NO_DISK = _GIGABYTE // 4
_ENGINE_S = 30.0


class Check(NamedTuple):
    """One answer of the doctor."""

    name: str
    status: Literal["ok", "warn", "fail"]
    """fail: a run can't go well; warn: it can, and something should be known or changed."""
    found: str
    advice: str = ""
    """What to do; empty when nothing is to be done."""


def checks(folder: Path = Path("runs")) -> list[Check]:
    """Every check, for runs that will be kept under `folder`, which need not exist yet."""
    folder = folder.expanduser().absolute()
    existing = next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))
    disk = check_disk(shutil.disk_usage(existing).free, existing)
    return [*map(check_module, _PACKAGES), check_device(), disk, check_file_system(existing)]


def check_engine(url: str, key: str | None) -> Check:
    """Whether a policy could be published to the vLLM server at `url`."""
    from agentloop.engines.publish.engine_control import EngineControl
    from agentloop.engines.remote.server_facts import check_version
    from agentloop.errors import UserError

    with EngineControl(url, model="", key=key, timeout_s=_ENGINE_S) as engine:
        if not engine.healthy():
            return Check("engine", "fail", f"nothing healthy answers at {url}", "Start it: agentloop engine MODEL")
        try:
            check_version(engine.version(), key="--engine", where=url)
            label, adapters = engine.label(), engine.adapters()
        except UserError as error:
            return Check("engine", "fail", str(error))
    more = f", and {', '.join(adapters)}" if adapters else ""
    return Check("engine", "ok", f"{url} serves weights that it calls {label!r}{more}")


def check_module(name: str) -> Check:
    """Whether `import NAME` gives this package: `context` and `replay` are names others use too."""
    own = Path(agentloop.__file__).resolve().parent.parent / name / "__init__.py"
    spec = importlib.util.find_spec(name)
    origin = Path(spec.origin).resolve() if spec and spec.origin else None
    if origin != own:
        advice = f"Rename or uninstall that; this program's own is {own.parent}."
        return Check(f"module {name}", "fail", f"comes from {origin}", advice)
    for local in (Path(f"{name}.py"), Path(name) / "__init__.py"):
        if local.is_file() and local.resolve() != own:
            advice = "Python started in this folder imports that instead. Rename it, or start elsewhere."
            return Check(f"module {name}", "warn", f"{local.resolve()} has the same name", advice)
    return Check(f"module {name}", "ok", str(own.parent))


def check_device() -> Check:
    import torch  # here: it takes seconds, and no other check needs it

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        memory = f"{free / _GIGABYTE:.0f} of {total / _GIGABYTE:.0f} GiB free"
        return Check("device", "ok", f"{torch.cuda.get_device_name()}, {memory}")
    return Check("device", "ok", f"no GPU; {os.cpu_count()} CPU cores", "Enough for the built-in model.")


def check_disk(free: int, folder: Path) -> Check:
    """Whether runs can be written there."""
    found = f"{free / _GIGABYTE:.1f} GiB free in {folder}"
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = (error.strerror or "refused").lower()
        return Check("disk", "fail", f"can't write in {folder}: {reason}", "Set run.folder to a folder of yours.")
    if free < _NO_DISK:
        return Check("disk", "fail", found, "Make room, or set run.folder to another disk.")
    if free < _LITTLE_DISK:
        return Check("disk", "warn", found, "Checkpoints of larger models won't fit; set run.folder to another disk.")
    return Check("disk", "ok", found)


def check_file_system(folder: Path) -> Check:
    """SQLite's WAL needs shared memory and locks that network file systems don't give."""
    from replay.storage.databases.disk import network_file_system  # here: another `replay` is found above

    kind = network_file_system(folder)
    if kind is None:
        return Check("file system", "ok", f"no network file system known at {folder}")
    advice = "A SQLite buffer is refused there. Set run.folder to a local disk, or replay.database to PostgreSQL."
    return Check("file system", "warn", f"{kind}, a network file system, at {folder}", advice)
