"""What a run in a sandbox may take, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stopped = Literal["time", "memory", "output"]


class SandboxFailed(RuntimeError):
    """The sandbox itself could not be started; nothing was run."""


@dataclass(frozen=True)
class SandboxLimits:
    """What one run may take."""

    seconds: float = 5.0
    """Of the clock, start included; then everything that it started is killed."""
    memory_mb: int = 512
    """MiB of all its processes together, looked at twenty times a second, and of the address space of each."""
    processes: int = 16
    """Processes and threads at one time."""
    output_bytes: int = 20_000
    """What it may print; at one more it ends."""
    files_mb: int = 16
    """MiB that it may write into /tmp, and as many into /dev/shm. Both are memory, and gone with the run."""

    def __post_init__(self) -> None:
        for name, least in (
            ("seconds", 0.0),
            ("memory_mb", 32),
            ("processes", 1),
            ("output_bytes", 1),
            ("files_mb", 1),
        ):
            value = getattr(self, name)
            if not (value > least if name == "seconds" else value >= least):
                rule = f"> {least:g}" if name == "seconds" else f">= {least}"
                raise ValueError(f"SandboxLimits.{name} must be {rule}, got {value}")


@dataclass(frozen=True)
class SandboxRun:
    """What became of a program."""

    output: str
    """What it printed, both streams in order, cut at the limit."""
    exit_code: int | None
    """128 + signal where a signal ended it; None where a limit did."""
    stopped: Stopped | None
    """The limit that ended it."""
    limits: SandboxLimits

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0

    def observation(self) -> str:
        """The output with how it ended, where it did not end well: what a policy is shown."""
        output = self.output.rstrip("\n")
        if self.succeeded:
            return output or "(no output)"
        return f"{output}\n[{self._ending()}]".lstrip("\n")

    def _ending(self) -> str:
        if self.stopped == "time":
            return f"stopped: it took longer than {self.limits.seconds:g} s"
        if self.stopped == "memory":
            return f"stopped: it took more than {self.limits.memory_mb} MiB of memory"
        if self.stopped == "output":
            return f"stopped: it printed more than {self.limits.output_bytes} bytes"
        return f"exit code {self.exit_code}"
