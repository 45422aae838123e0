"""A run is begun or continued by the same call, as a job that is started again needs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.training.train import train
from tests.fakes.runs import SilentDisplay, StopAfter, small_config

pytestmark = pytest.mark.slow


def two_iterations(folder: Path, model: Path, **sections: dict[str, object]) -> RunConfig:
    return small_config(
        folder,
        model,
        run={"iterations": 2, **sections.pop("run", {})},
        rollout={"max_turns": 1, "max_tokens_per_turn": 12},
        evaluation={"every": 0, "tasks": 1},
        **sections,
    )


def test_auto_begins_a_run_then_continues_it_and_leaves_it_alone_once_it_has_ended(tmp_path: Path, qwen2: Path) -> None:
    config = two_iterations(tmp_path, qwen2)
    stopped = train(config, resume="auto", display=StopAfter(1))
    assert (stopped.folder, stopped.iterations, stopped.exit_code) == (tmp_path / "small-001", 1, 143)
    assert train(config, resume="auto", display=SilentDisplay()).iterations == 2
    report, display = stopped.report.read_bytes(), SilentDisplay()
    ended = train(config, resume="auto", display=display)
    assert display.notes == [f"{tmp_path / 'small-001'} has ended after iteration 2: nothing is left"]
    assert (ended.folder, ended.iterations, ended.exit_code) == (tmp_path / "small-001", 2, 0)
    assert stopped.report.read_bytes() == report
    assert [path.name for path in tmp_path.glob("small-*")] == ["small-001"]


def test_a_run_is_begun_and_continued_in_the_folder_it_is_given(tmp_path: Path, qwen2: Path) -> None:
    config, folder = two_iterations(tmp_path, qwen2), tmp_path / "small-007"
    (folder / "logs").mkdir(parents=True)  # where a launch has begun to write
    assert train(config, run=folder, display=StopAfter(1)).iterations == 1
    train(two_iterations(tmp_path, qwen2, run={"iterations": 1}), display=SilentDisplay())  # small-008, the newest now
    assert train(config, run=folder, display=SilentDisplay()).folder == folder
    with pytest.raises(UserError, match=r"run.seed must be the run's own when resuming .*small-007"):
        train(two_iterations(tmp_path, qwen2, run={"seed": 3}), run=folder, display=SilentDisplay())


def test_a_run_that_can_not_be_put_together_leaves_only_the_logs_of_its_folder(tmp_path: Path, qwen2: Path) -> None:
    config, folder = two_iterations(tmp_path, tmp_path / "nowhere"), tmp_path / "small-001"
    (folder / "logs").mkdir(parents=True)
    with pytest.raises(UserError, match="nowhere"):
        train(config, run=folder, display=SilentDisplay())
    assert [path.name for path in folder.iterdir()] == ["logs"]
    assert train(two_iterations(tmp_path, qwen2), run=folder, display=SilentDisplay()).iterations == 2
