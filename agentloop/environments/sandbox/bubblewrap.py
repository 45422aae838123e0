"""Finds out whether bubblewrap can contain a program on this machine, and says how it is called.

Root gives itself up first, for no limit of processes holds for root, and what root may write in /proc reaches the whole
machine.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentloop.environments.sandbox.sandbox_run import SandboxFailed, SandboxLimits
from agentloop.environments.sandbox.system_calls import build_filter, load_libseccomp

PROGRAM = "/code/main.py"
"""Where a program lies in its sandbox."""
_NOBODY = 65534
_INSIDE = 1000
_TOOLS = {"bwrap": "bubblewrap", "prlimit": "util-linux", "setpriv": "util-linux"}
"""What must be installed, and in which package it is."""
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",  # or each thread takes 64 MiB of the address space, which is what memory is limited by
}
_MIB = 1 << 20
_FILES_OPEN = 64


@dataclass(frozen=True)
class Interpreter:
    """A Python with its standard library, none of whose packages are this project's."""

    executable: str
    prefix: str


@dataclass(frozen=True)
class Descriptors:
    """Open files that bubblewrap is given."""

    program: int
    seccomp: int
    status: int
    """It writes here which process is the first one of the sandbox, and how that ended."""
    block: int
    """It begins when it can read from here."""

    def all(self) -> tuple[int, ...]:
        return (self.program, self.seccomp, self.status, self.block)


def interpreters() -> list[Interpreter]:
    """The one that this program runs on, without its virtual environment; and the system's, if that can't be read."""
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    return [Interpreter(str(base), sys.base_prefix), Interpreter("/usr/bin/python3", "/usr")]


@cache
def seccomp_filter() -> bytes:
    """Raises SandboxFailed where there is no libseccomp."""
    library = load_libseccomp()
    if library is None:
        raise SandboxFailed("there is no libseccomp.so.2 (package libseccomp2)")
    return build_filter(library)


def check_tools() -> None:
    """Raises SandboxFailed for what is not installed."""
    if sys.platform != "linux":
        raise SandboxFailed(f"bubblewrap is for Linux, and this is {sys.platform}")
    for name, package in _TOOLS.items():
        if shutil.which(name) is None:
            raise SandboxFailed(f"there is no {name} (package {package})")


def command(interpreter: Interpreter, limits: SandboxLimits, files: Descriptors) -> list[str]:
    """All of it: without privileges, in namespaces of its own, with limits on every process."""
    return [
        *_without_privileges(),
        _path("bwrap"),
        *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", "--hostname", "sandbox", "--uid", str(_INSIDE), "--gid", str(_INSIDE)),
        *_file_system(interpreter, limits, program=files.program),
        "--clearenv",
        *(word for name, value in _ENVIRONMENT.items() for word in ("--setenv", name, value)),
        *("--chdir", "/tmp", "--seccomp", str(files.seccomp)),
        *("--json-status-fd", str(files.status), "--block-fd", str(files.block), "--"),
        *_limited(limits),
        *(interpreter.executable, "-I", PROGRAM),
    ]


def _without_privileges() -> list[str]:
    if os.geteuid() != 0:
        return []
    who = [f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
    return [_path("setpriv"), *who, "--inh-caps=-all", "--"]


def _file_system(interpreter: Interpreter, limits: SandboxLimits, *, program: int) -> list[str]:
    """The system to read, and two places to write that are memory of bounded size; all else can't be written."""
    shown = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        path = Path("/", name)
        if path.is_symlink():
            shown += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            shown += ["--ro-bind", str(path), str(path)]
    if not Path(interpreter.prefix).is_relative_to("/usr"):
        shown += ["--ro-bind", interpreter.prefix, interpreter.prefix]
    size = str(limits.files_mb * _MIB)
    return [
        *shown,
        *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--proc", "/proc", "--dev", "/dev"),
        *("--size", size, "--tmpfs", "/dev/shm", "--size", size, "--tmpfs", "/tmp"),
        *("--ro-bind-data", str(program), PROGRAM, "--remount-ro", "/dev", "--remount-ro", "/"),
    ]


def _limited(limits: SandboxLimits) -> Sequence[str]:
    """Set inside: there they count the sandbox's processes alone, of which bubblewrap's own is one."""
    bounds = {
        "as": limits.memory_mb * _MIB,
        "nproc": limits.processes + 1,
        "cpu": int(limits.seconds) + 1,
        "fsize": limits.files_mb * _MIB,
        "nofile": _FILES_OPEN,
        "core": 0,
        "memlock": 0,
        "msgqueue": 0,
    }
    return [_path("prlimit"), *(f"--{name}={most}:{most}" for name, most in bounds.items()), "--"]


def _path(tool: str) -> str:
    found = shutil.which(tool)
    if found is None:
        raise SandboxFailed(f"there is no {tool} (package {_TOOLS[tool]})")
    return found
