import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from agentloop.errors import UserError
from agentloop.runs.sinks import MetricsFile, MetricSinks, open_sinks


class Recording:
    """Takes iterations, and fails at the third if it is given an error."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False
        self._error = error

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if self._error is not None and len(self.rows) == 2:
            raise self._error
        self.rows.append((iteration, dict(metrics)))
        dict.clear(metrics)  # type: ignore[arg-type]  # each sink has a copy of its own

    def close(self) -> None:
        self.closed = True


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_file_resumed_has_every_iteration_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for iteration in range(6):
        first.log(iteration, {"a": 1.0 if iteration else float("nan")})
    assert len(lines(path)) == 6  # each as soon as it is logged
    first.close()
    resumed = MetricsFile(path, keep_through=3)
    for iteration in range(4, 8):
        resumed.log(iteration, {"a": 2.0})
    resumed.close()
    found = [(row["iteration"], row["a"]) for row in lines(path)]
    assert found == [(0, None), (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0), (7, 2.0)]


@pytest.mark.parametrize("tail", [b'{"iteration": 2, "a', b'{"iteration": 2}', b"\x00\x00\x00", b"\xff\n", b"3\n"])
def test_metrics_file_repairs_a_torn_tail(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1, "a": 1.0}\n' + tail)
    sink = MetricsFile(path)
    sink.log(2, {"a": 2.0})
    sink.close()
    assert lines(path) == [{"iteration": 1, "a": 1.0}, {"iteration": 2, "a": 2.0}]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("error", [OSError("read-only file system"), SystemExit(3)])
def test_metric_sinks_drop_a_sink_that_raises(error: BaseException) -> None:
    warnings: list[str] = []
    bad, good = Recording(error), Recording()
    sinks = MetricSinks({"bad": bad, "good": good}, warnings.append)
    for iteration in range(10):
        sinks.log(iteration, {"a": 1.0})
    sinks.close()
    assert warnings == [
        f"metrics sink bad failed: {type(error).__name__}: {error} at test_sinks.py:21. It gets nothing more; "
        "the database still gets everything."
    ]
    assert good.rows == [(iteration, {"a": 1.0}) for iteration in range(10)]
    assert good.closed
    assert not bad.closed
    assert len(bad.rows) == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def log(self, iteration, metrics): ...\n    close = None", "must name a class .* without close"),
        ("def __init__(self): ...\n    def log(self, iteration, metrics): ...", "must name a class .* with TypeError:"),
    ],
)
def test_open_sinks_refuses_a_class_that_is_no_sink(tmp_path: Path, body: str, message: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"class Own:\n    def close(self): ...\n    {body}\n")
    with pytest.raises(UserError, match=rf"^metrics\.sinks {message}"):
        open_sinks([f"{file}:Own"], tmp_path, warn=pytest.fail)


@pytest.mark.parametrize("names", [["tensorboard", "tensorboard"], ["missing.py:Sink"]])
def test_open_sinks_refuses_missing_and_repeated_names(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(UserError, match=r"^metrics\.sinks must .*, got "):
        open_sinks(names, tmp_path, warn=pytest.fail)
