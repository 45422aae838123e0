"""TensorBoard and Weights & Biases, with the real libraries: what they are given is read back from their files."""

import json
import math
import os
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from agentloop.errors import UserError
from agentloop.runs.sinks import open_sinks
from agentloop.training.train import train
from tests.fakes.runs import SilentDisplay, rows, small_config

pytestmark = pytest.mark.slow

os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-")  # it is looked at once, as trackio is imported
Rows = list[tuple[int, float]]
_BLOCK = 1 << 15


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """W&B's settings are the process's environment, which it reads once."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "20")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    yield
    wandb.teardown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "mine-001"
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"id": "abc123", "name": "mine", "config": {"run": {"seed": 7}}}))
    return path


def log_all(folder: Path, name: str, rows: list[tuple[int, dict[str, float]]], **keep: int) -> None:
    warnings: list[str] = []
    sinks = open_sinks([name], folder, warn=warnings.append, **keep)
    for iteration, metrics in rows:
        sinks.log(iteration, metrics)
    sinks.close()
    assert warnings == []


def tensorboard_scalars(folder: Path, name: str) -> Rows:
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def wandb_records(folder: Path) -> list[Any]:
    """What the only offline run holds, once W&B's own process has written the end of it."""
    deadline = time.monotonic() + 30
    while True:
        records = _written(folder)
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        assert time.monotonic() < deadline, [record.WhichOneof("record_type") for record in records]
        time.sleep(0.02)


def _written(folder: Path) -> list[Any]:
    """The records of its transaction log so far.

    LevelDB's log format: blocks of 32 KiB after 7 bytes that name the file; each piece has 4 bytes of checksum, 2 of
    length and 1 that says whether it is a whole record (1), or the first, a middle or the last piece of one.
    """
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, at, pieces, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if kind == 0:  # the rest of a block that no piece fits in
            at = (at // _BLOCK + 1) * _BLOCK
            continue
        if at + 7 + length > len(data):
            break
        pieces += data[at + 7 : at + 7 + length]
        at += 7 + length
        if _BLOCK - at % _BLOCK < 7:
            at = (at // _BLOCK + 1) * _BLOCK
        if kind in (1, 4):
            records.append(wandb_internal_pb2.Record.FromString(pieces))
            pieces = b""
    return records


def wandb_history(folder: Path) -> list[dict[str, float]]:
    rows = [record.history for record in wandb_records(folder) if record.WhichOneof("record_type") == "history"]
    found = [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item} for row in rows]
    return [{name: value for name, value in row.items() if not name.startswith(("_runtime", "_time"))} for row in found]


def trackio_history(run: str) -> list[dict[str, float]]:
    from trackio.sqlite_storage import SQLiteStorage

    found = SQLiteStorage.get_logs("agentloop", run)
    return [{name: value for name, value in row.items() if name != "timestamp"} for row in found]


def test_tensorboard_after_a_resume_has_every_iteration_once(folder: Path) -> None:
    log_all(folder, "tensorboard", [(i, {"a": 1.0, "b": math.nan}) for i in (1, 2, 3)])
    log_all(folder, "tensorboard", [(i, {"a": 2.0}) for i in (2, 3, 4)], keep_through=1)
    with pytest.raises(KeyError):
        tensorboard_scalars(folder, "b")
    assert tensorboard_scalars(folder, "a") == [(1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]


def test_trackio_keeps_a_run_of_our_name_and_id_that_goes_on(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log_all(folder, "trackio", [(1, {"actor/entropy": 0.5, "time/x": math.nan})])
    log_all(folder, "trackio", [(2, {"actor/entropy": 0.25})], keep_through=1)
    assert trackio_history("mine-001-abc123") == [{"actor/entropy": 0.5, "step": 1}, {"actor/entropy": 0.25, "step": 2}]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")]
)
def test_sink_without_package_is_refused(folder: Path, name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"^metrics\.sinks: {name} must not be used without .*\[{name}\]"):
        open_sinks([name], folder, warn=pytest.fail)


def test_wandb_online_without_a_key_is_refused_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(folder / "netrc"))
    with pytest.raises(UserError, match=r"^WANDB_MODE must be offline where W&B can't be used, got online with "):
        open_sinks(["wandb"], folder, warn=pytest.fail)


def test_wandb_out_of_reach_is_left_out_with_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    warnings: list[str] = []
    sinks = open_sinks(["wandb"], folder, warn=warnings.append)
    sinks.log(1, {"a": 1.0})
    sinks.close()
    assert (folder / "metrics.jsonl").read_text() == '{"iteration": 1, "a": 1.0}\n'
    (warning,) = warnings
    assert warning.startswith("metrics sink wandb failed: CommError: ")
    assert warning.endswith("It gets nothing; the database still gets everything.")


def test_run_gives_every_sink_what_the_database_has(tmp_path: Path, qwen2: Path) -> None:
    sinks, name = {"sinks": ("tensorboard", "wandb", "trackio")}, "batch/fresh"
    config, display = small_config(tmp_path, qwen2, metrics=sinks), SilentDisplay()
    folder = train(config, display=display).folder
    assert [note for note in display.notes if "metrics sink" in note] == []
    query = f"select iteration, value from metrics where name = '{name}' order by iteration"
    stored = rows(folder / "replay.sqlite", query)
    assert stored == [(1, 16.0), (2, 12.0), (3, 12.0)]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["iteration"], line[name]) for line in lines] == stored
    assert [(row["_step"], row[name]) for row in wandb_history(folder)] == stored
    (run,) = [record.run for record in wandb_records(folder) if record.WhichOneof("record_type") == "run"]
    described = json.loads((folder / "run.json").read_text())
    assert (run.run_id, run.display_name, run.project) == (described["id"], folder.name, "agentloop")
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["run"] == described["config"]["run"]
    history = trackio_history(f"{folder.name}-{described['id'][:8]}")
    assert [(row["step"], row[name]) for row in history if name in row] == stored
    assert tensorboard_scalars(folder, name) == stored
