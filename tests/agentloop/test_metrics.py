from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from agentloop.errors import UserError
from agentloop.runs.sinks import JsonlSink, MetricSink, SinkFan, load_sinks


class Recording:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((iteration, dict(metrics)))

    def close(self) -> None:
        self.closed = True


class Raising(Recording):
    """Takes two iterations, then fails."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if len(self.rows) == 2:
            raise OSError("read-only file system")
        super().log(iteration, metrics)


class Hanging(Recording):
    """Hangs until it is released, then fails."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()
        self.failed = threading.Event()

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.release.wait(20)
        self.failed.set()
        raise TimeoutError("gave up")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fan_of(warnings: list[str], capacity: int = 256, **sinks: MetricSink) -> SinkFan:
    return SinkFan(sinks, warnings.append, capacity=capacity)


def test_jsonl_sink_writes_one_object_per_iteration(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"actor/entropy": 0.5, "time/update": float("nan")})
    sink.log(2, {"actor/entropy": 0.25})
    sink.close()
    assert lines(tmp_path / "metrics.jsonl") == [
        {"iteration": 1, "actor/entropy": 0.5, "time/update": None},
        {"iteration": 2, "actor/entropy": 0.25},
    ]


def test_jsonl_sink_shows_a_line_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"a": 1.0})
    assert lines(tmp_path / "metrics.jsonl") == [{"iteration": 1, "a": 1.0}]
    sink.close()


def test_jsonl_sink_resumed_has_every_iteration_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    for iteration in range(6):
        first.log(iteration, {"a": 1.0})
    first.close()
    resumed = JsonlSink(path, keep_through=3)
    for iteration in range(4, 8):
        resumed.log(iteration, {"a": 2.0})
    resumed.close()
    assert [(row["iteration"], row["a"]) for row in lines(path)] == [
        (0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0), (7, 2.0),
    ]  # fmt: skip


@pytest.mark.parametrize("tail", [b'{"iteration": 2, "a', b'{"iteration": 2}', b"\x00\x00\x00", b"\xff\n", b"3\n"])
def test_jsonl_sink_repairs_a_torn_tail(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1, "a": 1.0}\n' + tail)
    sink = JsonlSink(path)
    sink.log(2, {"a": 2.0})
    sink.close()
    assert lines(path) == [{"iteration": 1, "a": 1.0}, {"iteration": 2, "a": 2.0}]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_sink_fan_gives_every_sink_everything_in_order(tmp_path: Path) -> None:
    warnings: list[str] = []
    first, second = Recording(), Recording()
    fan = fan_of(warnings, first=first, second=second)
    for iteration in range(100):
        fan.log(iteration, {"a": float(iteration)})
    fan.close()
    assert first.rows == second.rows == [(i, {"a": float(i)}) for i in range(100)]
    assert first.closed
    assert second.closed
    assert warnings == []
    assert fan.lost == {}


def test_sink_fan_drops_a_sink_that_raises_and_warns_once() -> None:
    warnings: list[str] = []
    bad, good = Raising(), Recording()
    fan = fan_of(warnings, bad=bad, good=good)
    for iteration in range(10):
        fan.log(iteration, {"a": 1.0})
    fan.close()
    assert warnings == [
        "metrics sink bad failed: OSError: read-only file system. It gets nothing more; "
        "the database still gets everything."
    ]
    assert len(good.rows) == 10
    assert fan.lost == {"bad": 8}


def test_sink_fan_drops_a_sink_that_hangs_without_waiting_for_it() -> None:
    warnings: list[str] = []
    hanging, good = Hanging(), Recording()
    fan = fan_of(warnings, capacity=4, hanging=hanging, good=good)
    started = time.monotonic()
    for iteration in range(50):
        fan.log(iteration, {"a": 1.0})
        time.sleep(0.001)  # an iteration takes its time; the good sink keeps up with that
    fan.close()
    assert time.monotonic() - started < 2.0
    assert len(warnings) == 1
    assert warnings[0].startswith("metrics sink hanging is 4 iterations behind.")
    assert len(good.rows) == 50
    assert fan.lost == {"hanging": 50}
    hanging.release.set()
    assert hanging.failed.wait(5)
    time.sleep(0.05)
    assert len(warnings) == 1


def test_sink_fan_flush_and_close_are_bounded_by_their_timeout() -> None:
    warnings: list[str] = []
    hanging = Hanging()
    fan = fan_of(warnings, hanging=hanging)
    fan.log(1, {})
    started = time.monotonic()
    fan.flush(timeout_s=0.05)
    fan.close(timeout_s=0.05)
    assert time.monotonic() - started < 1.0
    assert len(warnings) == 1
    hanging.release.set()


def test_sink_fan_flush_leaves_the_file_as_new_as_the_run(tmp_path: Path) -> None:
    fan = fan_of([], jsonl=JsonlSink(tmp_path / "metrics.jsonl"))
    for iteration in range(200):
        fan.log(iteration, {"a": 1.0})
    fan.flush()
    assert len(lines(tmp_path / "metrics.jsonl")) == 200
    fan.close()


def test_sink_fan_keeps_its_own_copy_of_the_metrics() -> None:
    sink = Recording()
    fan = fan_of([], sink=sink)
    metrics = {"a": 1.0}
    fan.log(1, metrics)
    metrics["a"] = 2.0
    fan.close()
    assert sink.rows == [(1, {"a": 1.0})]


def test_load_sinks_makes_a_sink_of_ones_own_with_the_run_folder(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "class Own:\n"
        "    def __init__(self, folder): self.folder = folder\n"
        "    def log(self, iteration, metrics): (self.folder / 'own.txt').write_text(str(iteration))\n"
        "    def close(self): pass\n"
    )
    sinks = load_sinks([f"{file}:Own"], tmp_path, warn=pytest.fail)
    fan = SinkFan(sinks, pytest.fail)
    fan.log(7, {})
    fan.close()
    assert (tmp_path / "own.txt").read_text() == "7"
    assert lines(tmp_path / "metrics.jsonl") == [{"iteration": 7}]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("def log(self, iteration, metrics): ...", "without close"),
        ("def log(self, iteration): ...\n    def close(self): ...", "with log(self, iteration)"),
        (
            "def __init__(self): ...\n    def log(self, iteration, metrics): ...\n    def close(self): ...",
            "with TypeError: ",
        ),
    ],
)
def test_load_sinks_refuses_a_class_that_is_no_sink(tmp_path: Path, body: str, part: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"class Own:\n    {body}\n")
    with pytest.raises(UserError) as raised:
        load_sinks([f"{file}:Own"], tmp_path, warn=pytest.fail)
    assert str(raised.value).startswith("metrics.sinks must name a class")
    assert part in str(raised.value)


@pytest.mark.parametrize("names", [["neptune"], ["jsonl"], ["tensorboard", "tensorboard"], ["missing.py:Sink"]])
def test_load_sinks_refuses_unknown_and_repeated_names(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(UserError, match=r"^metrics\.sinks must .*, got "):
        load_sinks(names, tmp_path, warn=pytest.fail)
