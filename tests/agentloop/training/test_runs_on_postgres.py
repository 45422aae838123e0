"""Whole runs whose experience is on a server."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from agentloop.cli.replay import app as replay_commands
from agentloop.config import RunConfig
from agentloop.config.config_file import load_config
from agentloop.errors import UserError
from agentloop.training.train import train
from replay import DatabaseRefused
from tests.fakes.processes import assert_same_run, assert_sound
from tests.fakes.runs import SilentDisplay, buffer_of, rows, small_config


class StoppedAfterOne(SilentDisplay):
    def iteration(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        super().iteration(number, total, metrics)
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_run_stopped_and_resumed_on_a_server_is_the_unbroken_run_on_sqlite(
    tmp_path: Path, qwen2: Path, new_database: Callable[..., str]
) -> None:
    whole = train(small_config(tmp_path / "whole", qwen2), display=SilentDisplay())
    config = small_config(tmp_path, qwen2, replay={"database": new_database()})
    assert train(config, display=StoppedAfterOne()).exit_code == 143
    ours = train(config, resume=True, display=SilentDisplay())
    assert (ours.exit_code, ours.iterations) == (0, 3)
    assert not list(ours.folder.glob("*.sqlite*"))
    assert_sound(ours.folder, iterations=3)
    assert_same_run(ours.folder, whole.folder)
    told = CliRunner().invoke(replay_commands, ["stats", str(ours.folder), "--json"])
    ((collected,),) = rows(whole.folder / "replay.sqlite", "select count(*) from trajectories")
    kept = {state: row["trajectories"] for state, row in json.loads(told.output)["states"].items()}
    kept.pop("orphaned", None)  # what the stop cut off
    assert sum(kept.values()) == collected


def test_runs_share_a_database_and_have_a_report_each(
    tmp_path: Path, qwen2: Path, new_database: Callable[..., str]
) -> None:
    url = new_database()
    for name in ("one", "two"):
        section = {"name": name, "iterations": 1}
        folder = train(small_config(tmp_path, qwen2, run=section, replay={"database": url})).folder
        assert f"<title>{name}-001 " in (folder / "report.html").read_text()
    assert rows(url, "select name from runs order by 1") == [("one-001",), ("two-001",)]
    assert buffer_of(tmp_path / "one-001") == url


def test_database_that_can_not_be_reached_stops_a_run_before_it_begins(tmp_path: Path, qwen2: Path) -> None:
    config = small_config(tmp_path, qwen2, replay={"database": "postgresql+psycopg:///x?host=/nowhere"})
    with pytest.raises(DatabaseRefused, match="must be a PostgreSQL database that can be reached"):
        train(config, display=SilentDisplay())
    assert not (tmp_path / "small-001").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://me:hunter2@host/db", "replay.database must hold no password"),
        ("postgresql://host/db?password=hunter2", "replay.database must hold no password"),
        ("postgresql://me:hun@ter2@host/db", "got a malformed postgresql:// URL"),
        ("mysql://me:hunter2@host/db", r"got mysql://me:\*\*\*@host/db"),
        ("buffer.sqlite", "replay.database must be a URL with a whole path, got 'buffer.sqlite'"),
        ("sqlite:///buffer.sqlite", "replay.database must be a URL with a whole path"),
    ],
)
def test_database_of_a_configuration_is_a_url_without_a_password(tmp_path: Path, url: str, message: str) -> None:
    named, plain = tmp_path / "named.yaml", tmp_path / "plain.yaml"
    named.write_text(f"replay: {{database: '{url}'}}")
    plain.touch()
    for file, overrides in ((named, ()), (plain, (f"replay.database={url}",))):
        with pytest.raises(UserError, match=message) as refused:
            load_config(file, overrides)
        assert "ter2" not in str(refused.value)
    with pytest.raises(ValidationError) as raw:
        RunConfig.model_validate({"replay": {"database": url}})
    assert "ter2" not in str(raw.value)
