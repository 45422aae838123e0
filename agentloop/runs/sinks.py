"""Sinks of metrics besides the database. A sink is checked before the run starts; one that fails is dropped."""

import contextlib
import importlib
import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from agentloop.errors import UserCodeFailed, UserError, needing, one_line
from agentloop.user_code import failing_as, load_class, users_code
from replay.storage.databases.disk import flush

_PROJECT = "agentloop"


class MetricSink(Protocol):
    """A sink of one's own for `metrics.sinks`: a class made with the run folder as its only argument.

    The run waits for both methods. After a resume, iterations newer than the checkpoint are logged again.
    """

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricSinks:
    """Gives every iteration's metrics to each sink in turn, and drops a sink that raises."""

    def __init__(self, sinks: Mapping[str, MetricSink], warn: Callable[[str], None]) -> None:
        self._sinks = dict(sinks)
        self._warn = warn

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, sink in list(self._sinks.items()):
            self._attempt(name, partial(sink.log, iteration, dict(metrics)))

    def close(self) -> None:
        for name, sink in list(self._sinks.items()):
            self._attempt(name, sink.close)

    def _attempt(self, name: str, call: Callable[[], None]) -> None:
        try:
            with users_code():
                call()
        except (UserCodeFailed, UserError) as problem:
            del self._sinks[name]
            self._warn(
                f"metrics sink {name} failed: {problem}. It gets nothing more; the database still gets everything."
            )


def open_sinks(
    names: Sequence[str], folder: Path, *, warn: Callable[[str], None], keep_through: int | None = None
) -> MetricSinks:
    """Open `metrics.jsonl` and the sinks of `metrics.sinks`.

    On resume `keep_through` is the checkpoint's iteration: later iterations are dropped from files. A service that
    can't be reached is left out, with a warning.
    """
    sinks: dict[str, MetricSink] = {}
    try:
        sinks["jsonl"] = MetricsFile(folder / "metrics.jsonl", keep_through=keep_through)
        for name in names:
            if name in sinks:
                raise UserError(
                    f"metrics.sinks must name each sink once, besides metrics.jsonl, got {name!r}. Remove it."
                )
            sink = _open_sink(name, folder, warn, keep_through)
            if sink is not None:
                sinks[name] = sink
    except OSError as error:
        problem = one_line(error)
        raise UserError(f"run.folder must be writable, got {problem}. Choose another run.folder.") from error
    return MetricSinks(sinks, warn)


def _open_sink(name: str, folder: Path, warn: Callable[[str], None], keep_through: int | None) -> MetricSink | None:
    if ":" in name:
        return _own_sink(name, folder)
    if name == "tensorboard":
        return TensorBoardSink(folder, keep_through=keep_through)
    services: dict[str, Callable[[Path], MetricSink]] = {"wandb": WandbSink, "trackio": TrackioSink}
    try:
        return services[name](folder)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  no failure of a network may stop the training
        warn(f"metrics sink {name} failed: {one_line(error)}. It gets nothing; the database still gets everything.")
        return None


def _own_sink(name: str, folder: Path) -> MetricSink:
    sink_class = load_class(name, what="metrics.sinks")
    for method in ("log", "close"):
        if not callable(getattr(sink_class, method, None)):
            raise UserError(
                f"metrics.sinks must name a class with log(iteration, metrics) and close(), got {name!r} without "
                f"{method}."
            )
    with failing_as(f"metrics.sinks must name a class that can be made with the run folder, got {name!r} with", "."):
        sink: MetricSink = sink_class(folder)
    return sink


class MetricsFile:
    """One JSON object per iteration in a file: `{"iteration": 3, "actor/entropy": 1.25, ...}`."""

    def __init__(self, path: Path, *, keep_through: int | None = None) -> None:
        """Append to `path`. Its iterations up to `keep_through` (None: all) stay; a torn line is removed."""
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
    """Remove torn and newer lines: a copy is written, then renamed, so a crash loses nothing."""
    content = path.read_bytes() if path.exists() else b""
    kept = b"".join(line for line in content.splitlines(keepends=True) if _is_kept(line, keep_through))
    if kept != content:
        copy = path.with_name(path.name + ".tmp")
        copy.write_bytes(kept)
        flush(copy)
        os.replace(copy, path)


def _is_kept(line: bytes, keep_through: int | None) -> bool:
    try:
        iteration = int(json.loads(line)["iteration"])
    except (ValueError, TypeError, KeyError):
        return False
    return line.endswith(b"\n") and (keep_through is None or iteration <= keep_through)


def _import_package(module: str, sink: str) -> Any:
    with needing(sink, f"metrics.sinks: {sink}"):
        return importlib.import_module(module)


def _finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


class TensorBoardSink:
    """Logs each metric as a scalar at its iteration, except for unknown values (NaN)."""

    def __init__(self, folder: Path, *, keep_through: int | None = None) -> None:
        """Hide the iterations after `keep_through` in earlier files of `folder`."""
        writer = _import_package("torch.utils.tensorboard", "tensorboard").SummaryWriter
        purged = None if keep_through is None else keep_through + 1
        self._writer: Any = writer(str(folder / "tensorboard"), purge_step=purged)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in _finite_metrics(metrics).items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Logs to Weights & Biases, offline unless WANDB_MODE says otherwise.

    WANDB_PROJECT, WANDB_ENTITY and W&B's other variables are respected. W&B's run has this run's id, so a resume goes
    on in it. W&B ignores iterations that it has already, which a resume repeats with the same values.
    """

    def __init__(self, folder: Path) -> None:
        """Raises UserError for a missing package or key, and W&B's own errors where its server can't be reached."""
        wandb = _import_package("wandb", "wandb")
        made: dict[str, Any] = json.loads((folder / "run.json").read_text())
        mode = os.environ.get("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "wandb" / "cache"))  # no files outside the run folder
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", "60")  # seconds for the last uploads, which would have no limit
        try:
            self._run: Any = wandb.init(
                mode=mode,
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                id=made["id"],
                name=folder.name,
                config=made["config"],
                dir=str(folder),
                resume="allow" if mode == "online" else None,
                # W&B takes neither the console's output nor the code.
                settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True),
            )
        except wandb.errors.UsageError as error:
            raise UserError(
                f"WANDB_MODE must be offline where W&B can't be used, got {mode} with {one_line(error)}. "
                "Unset it, or run wandb login."
            ) from error

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log(_finite_metrics(metrics), step=iteration)

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """Logs to trackio: on this machine (TRACKIO_DIR), unless TRACKIO_SPACE_ID or the like is set.

    The run is named after its folder and id, so a resume goes on in it. Iterations that a resume repeats are there
    twice, with the same values. TRACKIO_PROJECT names another project than `agentloop`.
    """

    def __init__(self, folder: Path) -> None:
        """Raises UserError for a missing package, and trackio's own errors where its server can't be reached."""
        self._trackio = _import_package("trackio", "trackio")
        made: dict[str, Any] = json.loads((folder / "run.json").read_text())
        with contextlib.redirect_stdout(io.StringIO()):  # stdout is for output that programs read
            self._run: Any = self._trackio.init(
                os.environ.get("TRACKIO_PROJECT", _PROJECT),
                name=f"{folder.name}-{made['id'][:8]}",
                config=made["config"],
                resume="allow",
                private=True,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log(_finite_metrics(metrics), step=iteration)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()  # the run's own `finish` would be called once more at the program's end
