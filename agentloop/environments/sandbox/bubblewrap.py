"""Starts a program so that bubblewrap contains it: namespaces, limits on each process, a cgroup for their sum."""

import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import pydantic.dataclasses
from pydantic import Field, PositiveFloat, PositiveInt

_NOBODY = 65534
_INSIDE = 1000
_TOOLS = {"bwrap": "bubblewrap", "prlimit": "util-linux", "setpriv": "util-linux"}
"""What must be installed, and in which package it is."""
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",  # or each thread takes 64 MiB of the address space, which is what memory is limited by
}
_MIB = 1 << 20
_FILES_OPEN = 64
_CGROUPS = Path("/sys/fs/cgroup")
_TO_DIE_S = 10.0


class SandboxFailed(RuntimeError):
    """The sandbox itself could not be started; nothing was run."""


@pydantic.dataclasses.dataclass(frozen=True)
class SandboxLimits:
    """What one run may take."""

    seconds: PositiveFloat = 5.0
    """Seconds of the clock, start included; then everything that it started is killed."""
    memory_mb: Annotated[int, Field(ge=32)] = 512
    """MiB of the address space of each process; and, where this machine lets us make a cgroup, of all that its
    processes hold together, files and buffers of sockets included."""
    processes: PositiveInt = 16
    """Processes and threads at one time."""
    output_bytes: PositiveInt = 20_000
    """What it may print; at one more it ends."""
    files_mb: PositiveInt = 16
    """MiB that it may write into /tmp, and as many into /dev/shm. Both are memory, and gone with the run."""


class Interpreter(NamedTuple):
    """A Python with its standard library, none of whose packages are this project's."""

    executable: str
    prefix: str


def interpreters() -> list[Interpreter]:
    """The one that this program runs on, without its virtual environment; and the system's, if that can't be read."""
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    return [Interpreter(str(base), sys.base_prefix), Interpreter("/usr/bin/python3", "/usr")]


def contained(
    words: Sequence[str],
    limits: SandboxLimits,
    *,
    shown: Sequence[str],
    further: Sequence[str] = (),
    cleared: bool = True,
    memory: Literal["as", "data"] = "as",
) -> list[str]:
    """The words that start these in a sandbox, which is `shown` paths besides the system.

    `further`: words for bubblewrap; `cleared`: ENVIRONMENT takes the place of the variables that they are started with;
    `memory`: what is limited of each process, its address space or what it may write in it.
    Raises SandboxFailed for what is not installed.
    """
    if sys.platform != "linux":
        raise SandboxFailed(f"bubblewrap is for Linux, and this is {sys.platform}")
    bwrap = _path("bwrap")
    # Root gives itself up: no limit of processes holds for it, and what it may write in /proc reaches the machine.
    who = [f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--inh-caps=-all", "--"]
    return [
        *([_path("setpriv"), *who] if os.geteuid() == 0 else []),
        bwrap,
        *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", "--hostname", "sandbox", "--uid", str(_INSIDE), "--gid", str(_INSIDE)),
        *_file_system(limits, shown, further),
        *(["--clearenv"] if cleared else []),
        *(word for name, value in ENVIRONMENT.items() if cleared for word in ("--setenv", name, value)),
        *("--chdir", "/tmp", "--"),
        *_limited(limits, memory),
        *words,
    ]


def _file_system(limits: SandboxLimits, paths: Sequence[str], further: Sequence[str]) -> list[str]:
    """The system to read, and two places to write that are memory of bounded size; all else can't be written."""
    shown = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        path = Path("/", name)
        if path.is_symlink():
            shown += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            shown += ["--ro-bind", str(path), str(path)]
    size = str(limits.files_mb * _MIB)
    return [
        *shown,
        *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--proc", "/proc", "--dev", "/dev"),
        *("--size", size, "--tmpfs", "/dev/shm", "--size", size, "--tmpfs", "/tmp"),
        *(word for path in paths if not Path(path).is_relative_to("/usr") for word in ("--ro-bind", path, path)),
        *(*further, "--remount-ro", "/dev", "--remount-ro", "/"),
    ]


def _limited(limits: SandboxLimits, memory: str) -> list[str]:
    """Set inside: there they count the sandbox's processes alone, of which bubblewrap's own is one."""
    bounds = {
        memory: limits.memory_mb * _MIB,
        "fsize": max(limits.files_mb * _MIB, limits.output_bytes + 1),
        "nproc": limits.processes + 1,
        "cpu": int(limits.seconds) + 1,
        "nofile": _FILES_OPEN,
        **dict.fromkeys(("core", "memlock", "msgqueue"), 0),
    }
    return [_path("prlimit"), *(f"--{name}={most}:{most}" for name, most in bounds.items()), "--"]


def _path(tool: str) -> str:
    found = shutil.which(tool)
    if found is None:
        raise SandboxFailed(f"there is no {tool} (package {_TOOLS[tool]})")
    return found


@dataclass(frozen=True)
class MemoryGroup:
    """A cgroup, of version 2 or 1, that limits what a program's processes hold together."""

    folder: Path

    def entered(self, words: list[str]) -> list[str]:
        """What starts these words in it."""
        entering = 'echo $$ > "$0/cgroup.procs" && unset PWD OLDPWD && exec "$@"'
        return ["/bin/sh", "-c", entering, str(self.folder), *words]

    def is_exceeded(self) -> bool:
        """True once a process of it was killed for memory."""
        for name in ("memory.events", "memory.oom_control"):
            with suppress(FileNotFoundError):
                lines = (self.folder / name).read_text().splitlines()
                return any(line.startswith("oom_kill ") and line != "oom_kill 0" for line in lines)
        return False


@contextmanager
def memory_group(memory_mb: int) -> Iterator[MemoryGroup | None]:
    """A new cgroup with that limit, until the end; None where this machine lets us make none."""
    folder = _new_cgroup(memory_mb * _MIB)
    try:
        yield None if folder is None else MemoryGroup(folder)
    finally:
        deadline = time.monotonic() + _TO_DIE_S
        while folder is not None and folder.exists():
            try:
                folder.rmdir()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise SandboxFailed(f"processes of {folder} must die when they are killed, got {error}") from error
                time.sleep(0.001)


def _new_cgroup(limit: int) -> Path | None:
    limits = {"memory.max": limit, "memory.swap.max": 0, "memory.oom.group": 1}
    limits |= {f"memory.{kind}limit_in_bytes": limit for kind in ("", "memsw.", "kmem.tcp.")}  # version 1
    for parent in _own_cgroups():
        folder = parent / f"agentloop-{uuid.uuid4().hex}"
        with suppress(OSError):
            folder.mkdir()
            there = [name for name in limits if (folder / name).exists()]
            for name in there:
                (folder / name).write_text(str(limits[name]))
            if "memory.max" in there or "memory.limit_in_bytes" in there:
                return folder
        if folder.exists():
            folder.rmdir()
    return None


def _own_cgroups() -> Iterator[Path]:
    """Groups above this process whose processes may be moved and whose memory may be counted; its own one first."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root = _CGROUPS / controllers
                own = root / path.strip("/")
                for place in (own, *own.parents):
                    if place.is_relative_to(root) and os.access(place / "cgroup.procs", os.W_OK):
                        yield place
