"""Rows of a data set as tasks, and in which order tasks come."""

import codecs
import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentloop.analysis.stored_policies import Asked, evaluate_run
from agentloop.config import RunConfig
from agentloop.config.sections.environments import TasksSection
from agentloop.environments import open_tasks
from agentloop.environments.datasets import load_rows
from agentloop.errors import UserError
from agentloop.training.train import train
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.processes import assert_same_run
from tests.fakes.refusals import refusal_of
from tests.fakes.runs import SilentDisplay, StopAfter, small_config

ENVIRONMENT = f"{ENVIRONMENTS / 'parity.py'}:RowParity"
NUMBERS = [{"number": number, "tags": ["a", str(number)]} for number in range(40)]


def jsonl(path: Path, values: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(value) + "\n" for value in values).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def parquet(path: Path, values: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(values), path)
    return path


def numbers(found: Any) -> list[int]:
    return [row["number"] for row in found]


def section(data: object, **keys: Any) -> TasksSection:
    return TasksSection(data=str(data), **keys)


def refusal(tasks: TasksSection) -> str:
    return refusal_of(load_rows, tasks)


# Formats


def test_rows_are_the_same_from_every_format(tmp_path: Path) -> None:
    whole = datasets.DatasetDict({"train": datasets.Dataset.from_list(NUMBERS)})
    whole.save_to_disk(str(tmp_path / "saved"))
    whole["train"].save_to_disk(str(tmp_path / "one"))
    (tmp_path / "marked.jsonl").write_bytes(codecs.BOM_UTF8 + jsonl(tmp_path / "b.jsonl", NUMBERS).read_bytes())
    (tmp_path / "folder").mkdir()
    jsonl(tmp_path / "folder" / "train.jsonl", NUMBERS)
    places = [
        jsonl(tmp_path / "a.jsonl", NUMBERS),
        jsonl(tmp_path / "a.jsonl.gz", NUMBERS),
        parquet(tmp_path / "a.parquet", NUMBERS),
        tmp_path / "folder" / "{split}.jsonl",
        f"hf:{tmp_path / 'saved'}",
        f"hf:{tmp_path / 'folder'}",
        tmp_path / "saved",
        tmp_path / "one",
        tmp_path / "marked.jsonl",
    ]
    loaded = [load_rows(section(place)) for place in places]
    assert len({found.digest for found in loaded}) == 1
    for found in loaded:
        assert sorted(numbers(found.train) + numbers(found.held_out)) == list(range(40))
        assert found.train[0] == NUMBERS[found.train[0]["number"]]
        assert numbers(found.train) == numbers(loaded[0].train)


def test_hugging_face_set_has_its_own_splits(tmp_path: Path) -> None:
    parts = {"train": NUMBERS[:30], "test": NUMBERS[28:]}
    splits = {name: datasets.Dataset.from_list(part) for name, part in parts.items()}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    found = load_rows(section(f"hf:{tmp_path / 'saved'}", held_out="test"))
    assert (numbers(found.train), numbers(found.held_out)) == (list(range(30)), list(range(28, 40)))
    assert found.summary() == "30 to train on, 12 held out, 2 of these also to train on"
    text = refusal(section(f"hf:{tmp_path / 'saved'}", held_out="dev"))
    assert text.startswith("tasks.data must be readable rows, got 'hf:")
    assert "no split 'dev' among train, test" in text


# Splits


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_field_of_a_row_says_which_split_it_is_of(tmp_path: Path, write: Any) -> None:
    named = [{**row, "split": "test" if row["number"] % 5 == 0 else "train"} for row in NUMBERS]
    path = write(tmp_path / f"mine.{write.__name__}", named)
    found = load_rows(section(path, held_out="test"))
    assert numbers(found.held_out) == [0, 5, 10, 15, 20, 25, 30, 35]
    assert len(found.train) == 32
    text = refusal(section(path, split="dev"))
    assert "must hold rows whose field 'split' is 'dev', got test, train in " in text


def test_share_that_is_held_out_is_decided_by_content_alone(tmp_path: Path) -> None:
    many = [{"number": number} for number in range(2000)]
    first = load_rows(section(jsonl(tmp_path / "a.jsonl", many), held_out_share=0.2))
    # 2000 x 0.2 = 400, with a standard deviation of sqrt(2000 x 0.2 x 0.8) = 18
    assert 330 < len(first.held_out) < 470
    more = load_rows(section(jsonl(tmp_path / "b.jsonl", many[::-1] + many + [{"number": 2000}]), held_out_share=0.2))
    assert set(numbers(first.held_out)) == set(numbers(more.held_out)) - {2000}
    assert set(numbers(more.held_out)).isdisjoint(numbers(more.train))


# Refusals


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"number": 1}\n{"number": \n', ":2: the line must be JSON ("),
        (b"[1]\n", ":1: the line must be a JSON object, got [1]."),
        (b"\n", "tasks.data must hold at least one row, got none in "),
        (b'{"a": 1}\n{"a": 1}\n', "rows to train on and others to evaluate on, got 2 in "),
    ],
)
def test_rows_that_can_not_be_read_are_refused_with_their_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert message in refusal(section(path))


def test_data_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    text = refusal(section(tmp_path / "missing.jsonl"))
    found = f"'{tmp_path}/missing.jsonl' (No such file or directory)"
    assert text == f"tasks.data must be readable, got {found}. Check its name."
    assert refusal(section(tmp_path / "missing.parquet")).startswith("tasks.data must be readable, got ")
    csv = refusal(section(tmp_path / "a.csv"))
    assert csv.startswith("tasks.data must end in .jsonl, .jsonl.gz or .parquet, got")
    assert f"pandas.read_csv('{tmp_path}/a.csv').to_json('rows.jsonl', orient='records', lines=True)" in csv
    (tmp_path / "a.jsonl.gz").write_bytes(b"not packed")
    found = f"{tmp_path}/a.jsonl.gz: contents must unpack, got a damaged or cut file "
    assert refusal(section(tmp_path / "a.jsonl.gz")).startswith(found)
    assert refusal(section("hf:missing/set")).startswith("tasks.data must be ")


@pytest.mark.parametrize(
    ("method", "task", "message"),
    [
        ("make_task", "'x'", "must define task_from_row when tasks.data names"),
        (
            "task_from_row",
            "row['question']",
            "must read every row, got KeyError: 'question' at mine.py:5 in the first row to train on.",
        ),
        ("task_from_row", "str(1 / (row['number'] - 17))", "got ZeroDivisionError: division by zero at mine.py:5 in "),
        ("task_from_row", "str(made.append(1) or made)", "must make the same task from the same row, got two differ"),
    ],
)
def test_environment_that_reads_no_rows_is_refused_first(tmp_path: Path, method: str, task: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(
        f"from agentloop import Environment, Task\nmade = []\nclass Mine(Environment):\n"
        f"    def {method}(self, row):\n        return Task({task})\n"
        "    def reward(self, task, messages):\n        return 0.0\n"
    )
    data = str(jsonl(tmp_path / "a.jsonl", NUMBERS))
    sections = {"environment": {"name": f"{tmp_path / 'mine.py'}:Mine"}, "tasks": {"data": data}}
    assert message in refusal_of(open_tasks, RunConfig.model_validate(sections))


# Runs


@pytest.mark.slow
def test_run_resumes_bit_for_bit_on_its_own_rows_alone(tmp_path: Path, qwen2: Path) -> None:
    data, display = jsonl(tmp_path / "numbers.jsonl", NUMBERS[:16]), SilentDisplay()
    broken, unbroken = (
        small_config(
            tmp_path / name,
            qwen2,
            run={"iterations": 6},
            environment={"name": ENVIRONMENT},
            tasks={"data": str(data)},
            rollout={"max_turns": 1, "max_tokens_per_turn": 12},
            evaluation={"every": 0, "tasks": 8},
            checkpoint={"every": 3},
        )
        for name in ("broken", "unbroken")
    )
    result = train(unbroken, display=display)
    assert train(broken, display=StopAfter(4)).iterations == 4
    jsonl(data, NUMBERS[:15])
    with pytest.raises(UserError, match=r"^tasks\.data must hold the rows that the run had last, got others\."):
        train(broken, resume=True, display=SilentDisplay())
    jsonl(data, NUMBERS[:16])
    assert_same_run(train(broken, resume=True, display=SilentDisplay()).folder, result.folder)

    assert "tasks: 13 to train on, 3 held out" in display.notes
    assert evaluate_run(result.folder, Asked(tasks=100)).evaluation.tasks == 3


def test_rows_as_they_stand_come_in_that_order_in_every_epoch(tmp_path: Path) -> None:
    for name in ("train", "test"):
        jsonl(tmp_path / f"{name}.jsonl", NUMBERS[:3])
    tasks = {"data": str(tmp_path / "{split}.jsonl"), "held_out": "test", "shuffle": False}
    _, source = open_tasks(RunConfig.model_validate({"environment": {"name": ENVIRONMENT}, "tasks": tasks}))
    shown = [str(source.train(index).prompt) for index in range(7)]
    assert shown == [f"Say something of even length, number {number}." for number in (0, 1, 2, 0, 1, 2, 0)]
