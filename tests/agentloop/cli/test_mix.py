"""What `agentloop replay mix` prints, and what it refuses. That runs then do it is tested on the runs."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agentloop.cli.main import app
from replay import ReplayStore, make_sampler
from tests.fakes.records import RUN, iterate, new_store
from tests.fakes.replay_command import preview_of

CONFIG = """
run: {iterations: 6}
environment: {task_pool: 3}
batch: {trajectories: 12, group_size: 4, mini_batch: 12}
replay:
  fraction: 0.5
  successful_only: true
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


def mix(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["replay", "mix", *map(str, arguments)])


def batches(config: Path, *arguments: str) -> list[dict[str, Any]]:
    result = mix("--config", config, "--json", *arguments)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.output)["batches"]
    return found


def test_mix_lets_the_buffer_grow_by_the_share_that_succeeds(config: Path) -> None:
    # 12 x .25 = 3 rows to draw after the first, so 9 are collected; 2.25 of them succeed, and so on
    found = batches(config, "--success", "0.25")
    assert [(batch["replay"], batch["fresh"]) for batch in found[:3]] == [(0, 12), (3, 9), (5, 7)]
    assert [batch["shortfall"] for batch in found[:3]] == [6, 3, 1]
    everything = batches(config, "--success", "0.25", "--set", "replay.successful_only=false")
    assert [batch["replay"] for batch in everything] == [0, 6, 6, 6, 6, 6]


def test_mix_knows_which_task_comes_when(config: Path) -> None:
    found = batches(config, "--set", "replay.unit=trajectory", "--success", "0.5")
    # 2 of the 4 members of every group, once half of each task's first 4 have succeeded; each task comes every time.
    assert [batch["members"] for batch in found[:2]] == [[], [[2, 3]]]
    assert [batch["groups"] for batch in found[:2]] == [[[4, 3]], [[2, 3]]]
    every_task_is_new = batches(config, "--set", "replay.unit=trajectory", "--set", "environment.task_pool=99")
    assert [batch["replay"] for batch in every_task_is_new] == [0] * 6


def test_mix_keeps_to_the_caps(config: Path) -> None:
    # Three tasks in the pool, so at most 3 x 1 of the 6 rows
    found = batches(config, "--success", "1.0", "--set", "replay.per_task=1")
    assert [batch["replay"] for batch in found] == [0, 3, 3, 3, 3, 3]
    # One row of each of the three groups collected first; then of the three (of three members) collected next
    found = batches(config, "--success", "1.0", "--set", "replay.per_group=1")
    assert [batch["replay"] for batch in found[:3]] == [0, 3, 6]


def test_mix_knows_how_many_rows_of_a_file_are_tasks(config: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"question": f"{number}?", "answer": "1", "split": "train"}) for number in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, lines[0].replace("train", "test")]))
    asked = ("--set", f"tasks.data={tmp_path}/rows.jsonl", "--set", "environment.task_pool=unlimited")
    held_out = ("--set", "tasks.held_out=test", "--set", "replay.unit=trajectory")
    assert [batch["members"] for batch in batches(config, *asked, *held_out)[:2]] == [[], [[2, 3]]]


def test_mix_as_text_sums_up(config: Path) -> None:
    result = mix("--config", config, "--success", "1.0", "--iterations", "4")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == "batches to come, where 100.0 % of the fresh episodes succeed:"
    titles = "iteration fraction planned replayed fresh short groups members replayed"
    assert lines[1].split() == titles.split()
    assert lines[3].split() == ["2", "0.500", "6", "6", "6", "0", "2x3", "-"]
    assert lines[-1] == "replayed in all: 18 of 24 planned, 37.5 % of 48 rows"  # 6 + 6 + 6


def test_mix_ends_where_the_run_would(config: Path) -> None:
    strict = ("--config", config, "--set", "replay.shortfall=error")
    late = mix(*strict, "--set", "replay.start.iteration=3", "--success", "0.1")
    assert late.exit_code == 1
    assert [line.split()[0] for line in late.output.splitlines()[2:4]] == ["1", "2"]
    assert "stopped: replay.fraction must be what the buffer can give" in late.output
    assert "got 2 of 6 rows in iteration 3" in late.output  # a tenth of 24 succeeded
    assert mix(*strict, "--set", "replay.start.buffer=6").exit_code == 0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three iterations of 8 rows, 3 of them successes, and two drawn in each."""
    path = tmp_path / "replay.sqlite"
    with closing(new_store(path)) as store:
        sampler = make_sampler("uniform", 3)
        for iteration in (1, 2, 3):
            iterate(store, iteration, sampler)
    return path


def test_mix_of_a_run_is_what_the_question_answers(run: Path) -> None:
    options = ("--set", "replay.sampler=recency", "--set", "replay.sampler_options={half_life: 2}")
    asked = (run, "--set", "replay.fraction=0.0234375", "--set", "replay.successful_only=false", *options)
    given = {"fraction": "0.0234375", "successful_only": "false", "sampler": "recency", "recency.half_life": "2"}
    result = mix(*asked, "--json")
    with closing(ReplayStore.open(run, read_only=True)) as store:
        assert (result.exit_code, json.loads(result.output)) == (0, preview_of(store, RUN, given))
    text = mix(*asked).output
    assert "iteration  4, policy 3" in text
    assert "replayed   3 of 3 planned (2.3 % configured)" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["eligible", "24", "0"] in lines
    # Of staleness 1 are the 8 rows of iteration 3, and 15 of the 24 failed.
    assert [line[-2:] for line in lines if line[:1] == ["1"] and line[-1:] == ["%"]][:1] == [["33.3", "%"]]
    assert [line[-2:] for line in lines if line[:1] == ["0"] and line[-1:] == ["%"]][-1:] == [["62.5", "%"]]
    assert sum(len(line) == 7 and line[3] in ("yes", "no") for line in lines) == 3


def test_mix_takes_another_configuration_for_a_run(config: Path, run: Path) -> None:
    answer = json.loads(mix(run, "--config", config, "--json").output)
    # 6 of 12 where 9 successes are stored; the configuration ends at iteration 6.
    assert (answer["plan"]["replay"], answer["plan"]["fresh"]) == (6, 6)
    assert [batch["iteration"] for batch in answer["batches"]] == [4, 5, 6]


def test_mix_names_a_source_that_can_give_nothing(run: Path) -> None:
    asked = (run, "--set", "replay.fraction=0.1", "--set", "replay.sources={self: 0.5, techer: 0.5}")
    sentence = "source 'techer' can give nothing: no row has it yet: import or attach some."
    assert json.loads(mix(*asked, "--json").output)["empty_sources"] == [sentence]
    assert mix(*asked).output.splitlines().count(sentence) == 1


def test_mix_runs_the_file_of_a_sampler_of_ones_own(run: Path) -> None:
    answer = json.loads(mix(run, "--set", "replay.sampler=examples/long_first.py:LongFirst", "--json").output)
    assert answer["settings"]["sampler"] == "examples/long_first.py:LongFirst"


def test_mix_by_settings_that_can_not_be_used_has_exit_code_1(run: Path) -> None:
    result = mix(run, "--set", "replay.fraction=0.5", "--set", "replay.shortfall=error")
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert result.output.startswith("stopped: replay.fraction must be what the buffer can give")


def test_mix_makes_no_more_iterations_than_the_run(config: Path) -> None:
    assert [batch["iteration"] for batch in batches(config, "--iterations", "50")] == [1, 2, 3, 4, 5, 6]


def test_mix_of_a_folder_that_is_no_run_says_so(config: Path, tmp_path: Path) -> None:
    result = mix(tmp_path, "--config", config)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert str(tmp_path) in result.stderr
