"""What `agentloop replay mix` prints, and what it refuses. That runs then do it is tested on the runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agentloop.cli.main import app

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


def mix(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["replay", "mix", str(config), *arguments])


def batches(config: Path, *arguments: str) -> list[dict[str, Any]]:
    result = mix(config, "--json", *arguments)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.output)["batches"]
    return found


def test_dry_run_lets_the_buffer_grow_by_the_share_that_succeeds(config: Path) -> None:
    # 12 x .25 = 3 rows to draw after the first, so 9 are collected; 2.25 of them succeed, and so on
    found = batches(config, "--success", "0.25")
    assert [(batch["replay"], batch["fresh"]) for batch in found[:3]] == [(0, 12), (3, 9), (5, 7)]
    assert [batch["shortfall"] for batch in found[:3]] == [6, 3, 1]
    everything = batches(config, "--success", "0.25", "--set", "replay.successful_only=false")
    assert [batch["replay"] for batch in everything] == [0, 6, 6, 6, 6, 6]


def test_dry_run_knows_which_task_comes_when(config: Path) -> None:
    found = batches(config, "--set", "replay.unit=trajectory", "--success", "0.5")
    picked = [sorted((pick["task"], pick["count"]) for pick in batch["picks"]) for batch in found]
    assert picked[0] == []
    assert [count for _, count in picked[1]] == [2, 2, 2]
    assert len({task for task, _ in picked[1]}) == 3


def test_dry_run_keeps_to_the_caps(config: Path) -> None:
    # Three tasks in the pool, so at most 3 x 1 of the 6 rows
    found = batches(config, "--success", "1.0", "--set", "replay.per_task=1")
    assert [batch["replay"] for batch in found] == [0, 3, 3, 3, 3, 3]
    # One row of each of the three groups collected first; then of the three (of three members) collected next
    found = batches(config, "--success", "1.0", "--set", "replay.per_group=1")
    assert [batch["replay"] for batch in found[:3]] == [0, 3, 6]


def test_dry_run_as_text_sums_up(config: Path) -> None:
    result = mix(config, "--success", "1.0", "--iterations", "4")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    titles = "iteration configured ruled achieved fresh replay short groups members replayed"
    assert lines[0].split() == titles.split()
    assert lines[2].split() == ["2", "0.500", "0.500", "0.500", "6", "6", "0", "2x3", "-"]
    assert lines[-1] == (
        "replayed in all: configured 24.0 (50.0 %), ruled 24 (50.0 %), achieved 18 (37.5 %)"  # 6 + 6 + 6 of 48
    )


def test_dry_run_ends_where_the_run_would(config: Path) -> None:
    strict = ("--set", "replay.shortfall=error")
    late = mix(config, *strict, "--set", "replay.start.iteration=3", "--success", "0.1")
    assert late.exit_code == 1
    assert [line.split()[0] for line in late.output.splitlines()[1:3]] == ["1", "2"]
    assert "stopped: replay.fraction must be what the buffer can give" in late.output
    assert "got 2 of 6 rows in iteration 3" in late.output  # a tenth of 24 succeeded
    assert mix(config, *strict, "--set", "replay.start.buffer=6").exit_code == 0


def test_dry_run_makes_no_more_iterations_than_the_run(config: Path) -> None:
    assert [batch["iteration"] for batch in batches(config, "--iterations", "50")] == [1, 2, 3, 4, 5, 6]


def test_dry_run_of_a_folder_that_is_no_run_says_so(config: Path, tmp_path: Path) -> None:
    result = mix(config, str(tmp_path))
    assert "RUN must be a run folder with a run.json" in str(result.exception)
