"""Checks of this machine for runs: optional packages, GPU, sandbox, the disk, and a vLLM server."""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.remote.server_facts import check_version
from agentloop.environments.sandbox.python_sandbox import usable_interpreter
from agentloop.errors import UserError
from agentloop.models.backbone_passes import compared, times_as_long
from agentloop.models.memory import in_gb, machine_memory
from replay.storage.databases.disk import network_file_system

_EXTRAS = {"postgres": ["psycopg"], "parquet": ["pyarrow"], "pandas": ["pandas", "pyarrow"], "inspect": ["uvicorn"]} | {
    name: [name] for name in ("datasets", "peft", "mcp", "tensorboard", "wandb", "trackio")
}
"""Packages of each extra of agentloop-replay, by which the extra is found."""
_GIGABYTE = 1024**3
_LITTLE_DISK = 2 * _GIGABYTE
_ENGINE_S = 30.0


class Check(NamedTuple):
    name: str
    status: Literal["ok", "warn", "fail"]
    """fail: no run can work; warn: runs can work, but people should know or change something."""
    found: str
    advice: str = ""


def check_machine(folder: Path = Path("runs")) -> list[Check]:
    """Make every check, for runs under `folder`, which need not exist yet."""
    folder = folder.absolute()
    existing = next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))
    disk = check_disk(shutil.disk_usage(existing).free, existing)
    return [_check_extras(), _check_device(), _check_sandbox(), disk]


def check_engine(url: str, key: str | None) -> Check:
    """Check whether a policy could be published to the vLLM server at `url`."""
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


def _check_extras() -> Check:
    there = [extra for extra, packages in _EXTRAS.items() if all(map(importlib.util.find_spec, packages))]
    absent = [extra for extra in _EXTRAS if extra not in there]
    advice = f"For {', '.join(absent)}: pip install 'agentloop-replay[NAME]'" if absent else ""
    return Check("optional packages", "ok", ", ".join(there) or "none", advice)


def _check_device() -> Check:
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        memory = f"{free / _GIGABYTE:.0f} of {total / _GIGABYTE:.0f} GiB free"
        return Check("device", "ok", f"{torch.cuda.get_device_name()}, {memory}")
    return check_cpu(times_as_long(torch.bfloat16))


def check_cpu(times: float) -> Check:
    """Check a machine without a GPU, by what `times_as_long` has measured of bfloat16."""
    found = f"no GPU; {os.cpu_count()} CPU cores, products in bfloat16 {compared(times)} than in float32"
    slow, quick = "Enough for the built-in model.", "For a model of your own set compute.autocast: bfloat16."
    return Check("device", "ok", f"{found}, {in_gb(machine_memory())} memory", quick if times < 1 else slow)


def _check_sandbox() -> Check:
    try:
        return Check("sandbox", "ok", f"bubblewrap contains {usable_interpreter().executable}")
    except UserError as error:
        return Check("sandbox", "warn", str(error), "Only environments that run a model's code need it.")


def check_disk(free: int, folder: Path) -> Check:
    """Check whether runs can be written in `folder`, which has `free` bytes."""
    found = f"{free / _GIGABYTE:.1f} GiB free in {folder}"
    if not os.access(folder, os.W_OK):
        return Check("disk", "fail", f"{folder} can't be written in", "Set run.folder to a folder of yours.")
    if (kind := network_file_system(folder)) is not None:  # SQLite's write-ahead log needs shared memory and locks
        advice = "A SQLite buffer is refused there. Set run.folder to a local disk, or replay.database to PostgreSQL."
        return Check("disk", "warn", f"{found}, on {kind}, a network file system", advice)
    if free < _LITTLE_DISK:
        return Check("disk", "warn", found, "Checkpoints of larger models won't fit; set run.folder to another disk.")
    return Check("disk", "ok", found)
