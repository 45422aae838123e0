"""Whole runs whose experience is on a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from agentloop.cli.replay import app as replay_commands
from agentloop.training.train import train
from tests.fakes.processes import assert_same_run, assert_sound
from tests.fakes.runs import SilentDisplay, StopAfter, rows, small_config


def test_run_stopped_and_resumed_on_a_server_is_the_unbroken_run_on_sqlite(
    tmp_path: Path, qwen2: Path, new_database: Callable[..., str]
) -> None:
    whole = train(small_config(tmp_path / "whole", qwen2), display=SilentDisplay())
    config = small_config(tmp_path, qwen2, replay={"database": new_database()})
    assert train(config, display=StopAfter(1)).exit_code == 143
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
