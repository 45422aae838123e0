"""From the names in `metrics.sinks` to open sinks, each checked before the run starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

from agentloop.errors import UserCodeFailed, UserError, one_line
from agentloop.runs.sinks.metric_sinks import MetricsFile, MetricSink, MetricSinks
from agentloop.user_code import load_class, users_code

_FILE_NAME = "metrics.jsonl"


def open_sinks(
    names: Sequence[str], folder: Path, *, warn: Callable[[str], None], keep_through: int | None = None
) -> MetricSinks:
    """`metrics.jsonl` and the sinks of `metrics.sinks`.

    `keep_through` is the checkpoint's iteration on resume: what files hold of later ones is dropped. A service that
    can't be reached now is left out, with a warning.
    """
    sinks: dict[str, MetricSink] = {}
    try:
        sinks["jsonl"] = MetricsFile(folder / _FILE_NAME, keep_through=keep_through)
        for name in names:
            if name == "jsonl":
                raise UserError(f"metrics.sinks must name what comes besides {_FILE_NAME}, got {name!r}. Remove it.")
            if name in sinks:
                raise UserError(f"metrics.sinks must name each sink once, got {name!r} twice. Remove one.")
            sink = _open(name, folder, warn, keep_through)
            if sink is not None:
                sinks[name] = sink
    except OSError as error:
        problem = one_line(error)
        raise UserError(f"run.folder must be writable, got {problem}. Choose another run.folder.") from error
    return MetricSinks(sinks, warn)


def _open(name: str, folder: Path, warn: Callable[[str], None], keep_through: int | None) -> MetricSink | None:
    if name == "tensorboard":
        from agentloop.runs.sinks.services import TensorBoardSink  # here: it brings a package that few runs need

        return TensorBoardSink(folder, keep_through=keep_through)
    if name in ("wandb", "trackio"):
        return _service(name, folder, warn)
    if ":" in name:
        return _own_sink(name, folder)
    raise UserError(
        f"metrics.sinks must be tensorboard, wandb, trackio or path/to/file.py:ClassName, got {name!r}. Correct it."
    )


def _service(name: str, folder: Path, warn: Callable[[str], None]) -> MetricSink | None:
    """A sink that may be at the other end of a network."""
    try:
        if name == "wandb":
            from agentloop.runs.sinks.services import WandbSink

            return WandbSink(folder)
        from agentloop.runs.sinks.services import TrackioSink

        return TrackioSink(folder)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  a network's failure, in whatever form, is no reason not to train
        warn(f"metrics sink {name} failed: {one_line(error)}. It gets nothing; the database still gets everything.")
        return None


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
        with users_code():
            sink: MetricSink = sink_class(folder)
    except UserCodeFailed as failed:
        raise UserError(
            f"metrics.sinks must name a class that can be made with the run folder, got {name!r} with {failed}."
        ) from failed
    return sink
