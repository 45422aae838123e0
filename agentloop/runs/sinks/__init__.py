"""Where numbers go besides the database. A sink that raises or hangs loses its numbers, never the run's."""

from __future__ import annotations

import inspect
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from agentloop.errors import UserError, one_line
from agentloop.user_code import load_class

JSONL_NAME = "metrics.jsonl"


class MetricSink(Protocol):
    """What `metrics.sinks` may name: a class made with the run folder as its only argument.

    Both methods are called from one thread of the sink's own. After a resume, iterations newer than the
    checkpoint are logged again.
    """

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
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


def load_sinks(
    names: Sequence[str], folder: Path, *, warn: Callable[[str], None], keep_through: int | None = None
) -> dict[str, MetricSink]:
    """`metrics.jsonl` and the sinks of `metrics.sinks` by name, each made once and checked before the run starts.

    `keep_through` is the checkpoint's iteration on resume: what files hold of later ones is dropped. A service that
    can't be reached now is told through `warn` and left out.
    """
    sinks: dict[str, MetricSink] = {"jsonl": _jsonl_in(folder, keep_through)}
    for name in names:
        if name == "jsonl":
            raise UserError(f"metrics.sinks must name what comes besides {JSONL_NAME}, got {name!r}. Remove it.")
        if name in sinks:
            raise UserError(f"metrics.sinks must name each sink once, got {name!r} twice. Remove one.")
        if name == "tensorboard":
            sinks[name] = _tensorboard_in(folder, keep_through)
        elif name == "wandb":
            if (service := _wandb(folder, warn)) is not None:
                sinks[name] = service
        elif ":" in name:
            sinks[name] = _own_sink(name, folder)
        else:
            raise UserError(
                f"metrics.sinks must be tensorboard, wandb or path/to/file.py:ClassName, got {name!r}. Correct it."
            )
    return sinks


class SinkFan:
    """Hands every iteration's metrics to each sink in a daemon thread of its own.

    `log` never waits and never raises. A sink that raises, or that is `capacity` iterations behind, is
    dropped: `warn` is told once, and `lost` counts the iterations it did not get.
    """

    def __init__(self, sinks: Mapping[str, MetricSink], warn: Callable[[str], None], *, capacity: int = 256) -> None:
        self._lanes = [_Lane(name, sink, warn, capacity) for name, sink in sinks.items()]

    @property
    def lost(self) -> dict[str, int]:
        """Iterations each dropped sink did not get."""
        return {lane.name: lane.lost for lane in self._lanes if lane.lost}

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for lane in self._lanes:
            lane.put((iteration, dict(metrics)))

    def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until the sinks have all that was logged, so that no checkpoint is ahead; drop the late."""
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.flush(deadline)

    def close(self, timeout_s: float = 5.0) -> None:
        """Flush, then close every sink; one that hangs is left to its daemon thread."""
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.put(None)
        for lane in self._lanes:
            lane.join(deadline)


_Item = tuple[int, dict[str, float]]


class _Lane:
    """One sink, its queue and its thread."""

    def __init__(self, name: str, sink: MetricSink, warn: Callable[[str], None], capacity: int) -> None:
        self.name = name
        self._sink = sink
        self._warn = warn
        self._queue: queue.Queue[_Item | None] = queue.Queue(capacity)
        self._lock = threading.Lock()
        self._logged = 0
        self._taken = 0
        self._dropped = False
        self._thread = threading.Thread(target=self._run, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        with self._lock:
            return self._logged - self._taken if self._dropped else 0

    def put(self, item: _Item | None) -> None:
        with self._lock:
            self._logged += item is not None
            if self._dropped:
                return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._drop(f"is {self._queue.maxsize} iterations behind")

    def flush(self, deadline: float) -> None:
        while not self._dropped and self._taken < self._logged:
            if time.monotonic() >= deadline:
                self._drop("does not keep up")
                return
            time.sleep(0.001)

    def join(self, deadline: float) -> None:
        if not self._dropped:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._drop("does not close")

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._dropped or not self._attempt(partial(self._sink.log, *item)):
                return
            with self._lock:
                self._taken += 1
        self._attempt(self._sink.close)

    def _attempt(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except (Exception, SystemExit) as error:  # noqa: BLE001  a sink of someone else's may raise anything
            self._drop(f"failed: {one_line(error)}")
            return False
        return True

    def _drop(self, problem: str) -> None:
        with self._lock:
            if self._dropped:
                return
            self._dropped = True
        self._warn(f"metrics sink {self.name} {problem}. It gets nothing more; the database still gets everything.")


def _jsonl_in(folder: Path, keep_through: int | None) -> JsonlSink:
    with _writable():
        return JsonlSink(folder / JSONL_NAME, keep_through=keep_through)


def _tensorboard_in(folder: Path, keep_through: int | None) -> MetricSink:
    from agentloop.runs.sinks.tensorboard import TensorBoardSink  # here: it brings a package that few runs need

    with _writable():
        return TensorBoardSink(folder, keep_through=keep_through)


def _wandb(folder: Path, warn: Callable[[str], None]) -> MetricSink | None:
    from agentloop.runs.sinks.wandb import WandbSink

    try:
        return WandbSink(folder)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  a network's failure, in whatever form, is no reason not to train
        warn(f"metrics sink wandb failed: {one_line(error)}. It gets nothing; the database still gets everything.")
        return None


@contextmanager
def _writable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = one_line(error)
        raise UserError(f"run.folder must be writable, got {problem}. Choose another run.folder.") from error


def _own_sink(name: str, folder: Path) -> MetricSink:
    sink_class = load_class(name, what="metrics.sinks")
    for method, arguments in (("log", (None, 1, {})), ("close", (None,))):
        function = getattr(sink_class, method, None)
        if not callable(function):
            raise UserError(f"metrics.sinks must name a class with log and close, got {name!r} without {method}.")
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError:
            raise UserError(
                f"metrics.sinks must name a class with log(iteration, metrics) and close(), got {name!r} "
                f"with {method}{inspect.signature(function)}."
            ) from None
    try:
        sink: MetricSink = sink_class(folder)
    except Exception as error:
        raise UserError(
            f"metrics.sinks must name a class that can be made with the run folder, got {name!r} "
            f"with {one_line(error)}."
        ) from error
    return sink


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
