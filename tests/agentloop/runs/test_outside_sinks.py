"""TensorBoard and Weights & Biases, with the real libraries: what they are given is read back from their files."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from agentloop.errors import UserError
from agentloop.runs.sinks import open_sinks
from agentloop.training.train import train
from tests.fakes.runs import SilentDisplay, rows, save_qwen2, small_config

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


def test_wandb_keeps_an_offline_run_with_our_id_in_the_run_folder(folder: Path) -> None:
    log_all(folder, "wandb", [(1, {"actor/entropy": 0.5, "time/x": math.nan}), (3, {"actor/entropy": 0.25})])
    assert wandb_history(folder) == [{"actor/entropy": 0.5, "_step": 1}, {"actor/entropy": 0.25, "_step": 3}]
    (run,) = [record.run for record in wandb_records(folder) if record.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.display_name, run.project) == ("abc123", "mine-001", "agentloop")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["run"] == {"seed": 7}


def test_trackio_keeps_a_run_of_our_name_and_id_that_goes_on(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log_all(folder, "trackio", [(1, {"actor/entropy": 0.5, "time/x": math.nan})])
    log_all(folder, "trackio", [(2, {"actor/entropy": 0.25})], keep_through=1)
    assert trackio_history("mine-001-abc123") == [{"actor/entropy": 0.5, "step": 1}, {"actor/entropy": 0.25, "step": 2}]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")],
)
def test_sink_without_its_package_is_refused_with_the_extra(
    folder: Path, name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"got {name} without its package\. .*agentloop-replay\[{name}\]"):
        open_sinks([name], folder, warn=pytest.fail)


def test_wandb_online_without_a_key_is_refused_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(folder / "netrc"))
    with pytest.raises(UserError, match=r"^WANDB_MODE must be offline where W&B can't be used, got online with "):
        open_sinks(["wandb"], folder, warn=pytest.fail)


def test_wandb_that_can_not_be_reached_is_left_out_with_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


class _Server(BaseHTTPRequestHandler):
    """Answers what W&B asks as a run begins; nothing any more once `gone`."""

    gone: threading.Event

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"]))
        if self.gone.is_set():
            time.sleep(60)
        project = {"id": "p", "name": "agentloop", "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "b", "name": "abc123", "displayName": "mine", "config": "{}", "project": project}
        begun = {"upsertBucket": {"bucket": bucket, "inserted": True}}
        answer = json.dumps({"data": begun if b"upsertBucket" in asked else {}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def test_wandb_whose_server_stops_answering_holds_up_neither_the_run_nor_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Server, "gone", gone := threading.Event(), raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {
        "MODE": "online",
        "API_KEY": "0" * 40,
        "BASE_URL": f"http://127.0.0.1:{server.server_port}",
        "FINISH_TIMEOUT": "1",
    }.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    sinks = open_sinks(["wandb"], folder, warn=pytest.fail)
    gone.set()
    for iteration in range(100):
        sinks.log(iteration, {"a": 1.0})
    sinks.close()  # without a limit of its own, this waits for the server for good
    server.shutdown()
    assert list(folder.glob("wandb/run-*/run-abc123.wandb"))


def test_run_gives_every_sink_what_the_database_has(tmp_path: Path) -> None:
    model = save_qwen2(tmp_path / "qwen2")
    config = small_config(tmp_path / "runs", model, metrics={"sinks": ("tensorboard", "wandb", "trackio")})
    display = SilentDisplay()
    result = train(config, display=display)
    assert [note for note in display.notes if "metrics sink" in note] == []
    stored = rows(
        result.folder / "replay.sqlite",
        "select iteration, value from metrics where name = 'actor/fresh/pg_loss' order by iteration",
    )
    name = "actor/fresh/pg_loss"
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["iteration"], line[name]) for line in lines] == stored
    assert [(row["_step"], row[name]) for row in wandb_history(result.folder)] == stored
    run = f"{result.folder.name}-{json.loads((result.folder / 'run.json').read_text())['id'][:8]}"
    assert [(row["step"], row[name]) for row in trackio_history(run)] == stored
    assert tensorboard_scalars(result.folder, name) == [(i, pytest.approx(value, rel=1e-6)) for i, value in stored]
    assert len(stored) == 3
