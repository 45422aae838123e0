"""Where a run lives on disk, and where the files are that its configuration names."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.config.config_file import load_plain
from agentloop.runs.run_folder import (
    config_to_resume,
    create_run_folder,
    open_run_folder,
    record_config,
    resumed_run_folder,
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose files are named from it, where a run begins."""
    here = tmp_path / "a folder"
    for folder in ("model", "data"):
        (here / folder).mkdir(parents=True)
    monkeypatch.chdir(here)
    for name in ("mine.py", "rewards.py", "looking.py", "data/train.jsonl", "data/test.jsonl"):
        Path(name).touch()
    return here


def test_a_run_finds_its_files_from_any_directory(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {
        "model": {"path": "model"},
        "environment": {"name": "mine.py:Mine", "options": {"hint": "Long. " * 999}},
        "tasks": {"data": "data/{split}.jsonl", "held_out": "test"},
        "reward": {"functions": [{"function": "rewards.py:brief", "weight": 0.5}]},
    }

    def names(config: RunConfig) -> list[str | None]:
        judge = config.reward.functions[0].function
        return [config.model.path, config.environment.name, config.tasks.data, config.tasks.held_out, judge]

    run = create_run_folder(load_plain(given)).path.absolute()
    before = (run / "run.json").read_text()
    Path("test").touch()  # what `tasks.held_out: test` is not
    as_given = ["model", "mine.py:Mine", "data/{split}.jsonl", "test", "rewards.py:brief"]
    assert names(open_run_folder(run).config) == as_given
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("rewards.py").touch()  # another file
    found = open_run_folder(run).config
    assert names(found) == [f"{here}/{name}" if name != "test" else name for name in as_given]
    assert found.environment.options == {"hint": "Long. " * 999}
    # It is written down as it was given, so that it goes on from there, too, and where all of it has been moved.
    record_config(resumed_run_folder(config_to_resume(run, ["run.iterations=2"]), run))
    after = json.loads((run / "run.json").read_text())["config"]
    assert {**after, "run": None} == {**json.loads(before)["config"], "run": None} and after["run"]["iterations"] == 2
    # A copy of the project is one of its own.
    for place in (shutil.copytree(here, tmp_path / "copy"), here.rename(tmp_path / "moved")):
        monkeypatch.chdir(place)
        assert names(open_run_folder(run.relative_to(here)).config) == as_given


@pytest.mark.parametrize(("program", "file"), [(f"{sys.executable} ", "looking.py"), ("", "looking.py:solve")])
def test_resumed_run_finds_its_agent(
    program: str, file: str, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"environment": {"agent": program + file}, "tasks": {"data": "data/train.jsonl"}}
    run = create_run_folder(load_plain(given)).path
    place = run.absolute()
    monkeypatch.chdir(tmp_path)
    assert open_run_folder(place).config.environment.agent == f"{program}'{here}/{file}'"
