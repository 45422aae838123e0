"""Builds the command that runs a program in bubblewrap: namespaces, limits per process, and a cgroup for their sum."""

import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pydantic.dataclasses
from pydantic import Field, PositiveFloat, PositiveInt

_NOBODY = 65534
_INSIDE = 1000
_TOOLS = {"bwrap": "bubblewrap", "prlimit": "util-linux", "setpriv": "util-linux"}
"""Programs that must be installed, with their packages."""
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",  # otherwise each thread takes 64 MiB of the address space, which is limited
}
_MIB = 1 << 20
_FILES_OPEN = 64
_CGROUPS = Path("/sys/fs/cgroup")
_TO_DIE_S = 10.0


class SandboxFailed(RuntimeError):
    """The sandbox could not be started, so nothing was run."""


@pydantic.dataclasses.dataclass(frozen=True)
class SandboxLimits:
    """Limits of one run of a program."""

    seconds: PositiveFloat = 5.0
    """Wall-clock seconds with the start; then all processes of the program are killed."""
    memory_mb: Annotated[int, Field(ge=32)] = 512
    """MiB of the address space of each process. Where this machine allows a cgroup, also the MiB that all processes
    hold together, with files and socket buffers."""
    processes: PositiveInt = 16
    """Processes and threads at one time."""
    output_bytes: PositiveInt = 20_000
    """Bytes that the program may print; one more ends it."""
    files_mb: PositiveInt = 16
    """MiB that the program may write into /tmp, and as many into /dev/shm. Both are memory and vanish with the run."""


def contained(
    words: Sequence[str],
    limits: SandboxLimits,
    *,
    shown: Sequence[str],
    further: Sequence[str] = (),
    cleared: bool = True,
    memory: Literal["as", "data"] = "as",
) -> list[str]:
    """Build the command that runs `words` in a sandbox, which shows the system and the paths `shown`.

    `further` are more words for bubblewrap. `cleared`: ENVIRONMENT replaces the inherited variables. `memory`: each
    process is limited in its address space, or only in the writable part of it.
    Raises SandboxFailed if a program is not installed.
    """
    if sys.platform != "linux":
        raise SandboxFailed(f"bubblewrap is for Linux, and this is {sys.platform}")
    bwrap = _path("bwrap")
    # Root becomes nobody: no limit of processes holds for root, and root's writes in /proc reach the machine.
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
    """Build the words that show the system read-only, with two writable places in memory of bounded size."""
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
    """Build the words that set the limits inside the sandbox, where they count its processes and bubblewrap's own."""
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
    """A cgroup, of version 2 or 1, that limits the memory of all of a program's processes together."""

    folder: Path

    def entered(self, words: list[str]) -> list[str]:
        """Build the command that starts these words in the group."""
        entering = 'echo $$ > "$0/cgroup.procs" && unset PWD OLDPWD && exec "$@"'
        return ["/bin/sh", "-c", entering, str(self.folder), *words]

    def is_exceeded(self) -> bool:
        """True once a process of the group was killed for its memory."""
        for name in ("memory.events", "memory.oom_control"):
            with suppress(FileNotFoundError):
                lines = (self.folder / name).read_text().splitlines()
                return any(line.startswith("oom_kill ") and line != "oom_kill 0" for line in lines)
        return False


@contextmanager
def memory_group(memory_mb: int) -> Iterator[MemoryGroup | None]:
    """Yield a new cgroup with this limit; None if the machine allows none."""
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
    """Find cgroups above this process whose processes may be moved and whose memory can be limited, its own first."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root = _CGROUPS / controllers
                own = root / path.strip("/")
                for place in (own, *own.parents):
                    if place.is_relative_to(root) and os.access(place / "cgroup.procs", os.W_OK):
                        yield place
