"""Exported rows are conversations in the chat format, which other programs train on as they are."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from context.messages import Message, ToolCall, to_template
from replay import ReplayStore
from replay.exchange import export_file, import_file
from tests.fakes.real_templates import real_template
from tests.fakes.records import new_store, put, sql, trajectory

FILES = Path(__file__).with_name("files")
STORED = "2026-01-02T03:04:05+00:00"
SAID = (
    Message("user", "What is 1 + 1?", note="Be brief."),
    Message("assistant", "", "llm", (ToolCall("add", {"a": 1, "b": 1.5}, "c1"),)),
    Message("tool", "error: b", "env", name="add", tool_call_id="c1", error_kind="arguments"),
    Message("assistant", "", "llm", (ToolCall("find", {"deep": {"key": [None]}}, "c2"),)),
    Message("tool", "2", "env", name="find", tool_call_id="c2"),
    Message("assistant", "2", "llm", reward=1.0),
)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "number", "description": "first"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "add two", "parameters": PARAMETERS}}]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ReplayStore]:
    """Two rows of equal tokens."""
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        put(store, *(replace(trajectory(id, slot=slot), messages=SAID) for slot, id in enumerate("ab")))
        sql(tmp_path / "replay.sqlite", f"update trajectories set created_at = '{STORED}'")
        yield store


def exported(store: ReplayStore, path: Path) -> tuple[list[Any], Any]:
    """The rows of an exported file, as plain readers of JSON and as the library `datasets` give them."""
    datasets = pytest.importorskip("datasets", reason="datasets is installed by make test")
    for file in (path.with_suffix(".jsonl"), path.with_suffix(".parquet")):
        export_file(store, file, tools_of=lambda row: TOOLS)
    table = datasets.load_dataset("parquet", data_files=str(file), split="train", cache_dir=str(path.parent / "cache"))
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()], table


def test_chat_templates_write_exported_rows_as_they_write_the_episode(
    store: ReplayStore, tmp_path: Path, qwen2: Path
) -> None:
    from transformers import AutoTokenizer

    lines, table = exported(store, tmp_path / "rows")
    tokenizer, said = AutoTokenizer.from_pretrained(qwen2), [*map(to_template, SAID)]
    for name in ("trl/llama3_1", "trl/qwen3", "axolotl/chatml"):
        options = {"chat_template": real_template(name).text, "tokenize": False}
        wanted = tokenizer.apply_chat_template(said, tools=TOOLS, **options)
        for row in (lines[0], table[0]):
            assert tokenizer.apply_chat_template(row["messages"], tools=row["tools"], **options) == wanted
    assert lines[0]["messages"][1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1.5}}}
    ]
    assert (lines[0]["created_at"], table[0]["created_at"].isoformat()) == (STORED, STORED)
    assert {"group_id", "group_success", "group_reward"} < lines[0].keys() == set(table.column_names)


@pytest.mark.slow
def test_trl_trains_on_exported_rows(store: ReplayStore, tmp_path: Path, qwen2: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    _, table = exported(store, tmp_path / "rows")
    options: dict[str, Any] = {"max_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False}
    trainer = SFTTrainer(str(qwen2), args=SFTConfig(str(tmp_path / "out"), **options), train_dataset=table)
    assert trainer.train().training_loss > 0


def test_times_survive_an_import_and_equal_tokens_are_written_once(store: ReplayStore, tmp_path: Path) -> None:
    for ending in ("jsonl", "parquet"):
        report = export_file(store, tmp_path / f"once.{ending}", unique=True)
        assert (report.rows, dict(report.left)) == (1, {"of equal tokens": 1})
        with closing(ReplayStore.create(tmp_path / f"{ending}.sqlite")) as other:
            import_file(other, tmp_path / f"once.{ending}")
            assert sql(other, "select id, created_at from trajectories") == [("a", STORED)]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_files_of_the_earlier_format_are_imported(tmp_path: Path, ending: str) -> None:
    """An export of format 7, whose call has an argument NaN."""
    with closing(ReplayStore.create(tmp_path / "new.sqlite")) as store:
        assert import_file(store, FILES / f"format_7.{ending}", name=None).inserted == 1
        export_file(store, tmp_path / f"again.{ending}")
        (row,) = store.read(["t1"])
        with closing(ReplayStore.create(tmp_path / "newer.sqlite")) as newer:
            import_file(newer, tmp_path / f"again.{ending}", name=None)
            (same,) = newer.read(["t1"])
    assert row.record.error_kinds == "bad_arguments timeout" and row.messages[0].note == "Be brief."
    assert repr(same.messages) == repr(row.messages) and "nan" in repr(row.messages)  # NaN is not equal to itself
    assert (same.record, same.id) == (row.record, "t1")
