"""What a metric sink is, and all sinks of a run as one: a sink that raises loses its numbers, never the run's."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from agentloop.errors import CodeInterrupted, UserCodeFailed, UserError
from agentloop.user_code import users_code


class MetricSink(Protocol):
    """What `metrics.sinks` may name: a class made with the run folder as its only argument.

    The run waits for both methods. After a resume, iterations newer than the checkpoint are logged again.
    """

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricSinks:
    """Gives every iteration's metrics to each sink in turn, and drops a sink that raises."""

    def __init__(self, sinks: Mapping[str, MetricSink], warn: Callable[[str], None]) -> None:
        self.missed: dict[str, int] = {}
        """Iterations that each dropped sink did not get."""
        self._sinks = dict(sinks)
        self._warn = warn

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, sink in list(self._sinks.items()):
            self._attempt(name, partial(sink.log, iteration, dict(metrics)))
        for name in self.missed:
            self.missed[name] += 1

    def close(self) -> None:
        """Close every sink, and warn of what the dropped ones did not get."""
        for name, count in self.missed.items():
            self._warn(f"metrics sink {name} missed {count} iterations, which the database has.")
        for name, sink in list(self._sinks.items()):
            self._attempt(name, sink.close)

    def _attempt(self, name: str, call: Callable[[], None]) -> None:
        try:
            with users_code():
                call()
        except (UserCodeFailed, UserError, CodeInterrupted) as problem:
            del self._sinks[name]
            self.missed[name] = 0
            self._warn(
                f"metrics sink {name} failed: {problem}. It gets nothing more; the database still gets everything."
            )


def without_package(sink: str) -> UserError:
    """Why a sink that an extra brings can't be opened here."""
    return UserError(
        f"metrics.sinks must name what is installed, got {sink} without its package. Install the extra: pip install "
        f"'agentloop-replay[{sink}]', or remove it."
    )


class MetricsFile:
    """One JSON object per iteration in a file: `{"iteration": 3, "actor/entropy": 1.25, ...}`."""

    def __init__(self, path: Path, *, keep_through: int | None = None) -> None:
        """Goes on with `path`: its iterations up to `keep_through` (None: all) stay, a torn line goes."""
        _keep_whole_lines(path, keep_through)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        # JSON has no NaN or infinity; unknown is null, never 0.
        finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"iteration": iteration, **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _keep_whole_lines(path: Path, keep_through: int | None) -> None:
    """Rewrite `path` beside itself, then rename: a crash here loses nothing. Untouched when all is well."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    kept = b"".join(line for line in content.splitlines(keepends=True) if _is_kept(line, keep_through))
    if kept == content:
        return
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _is_kept(line: bytes, keep_through: int | None) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        iteration = json.loads(line)["iteration"]
    except (ValueError, TypeError, KeyError):
        return False
    return isinstance(iteration, int) and (keep_through is None or iteration <= keep_through)
