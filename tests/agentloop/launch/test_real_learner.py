"""A real learner under a launch: killed, it goes on with its run; ended, it is left alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import yaml

from agentloop.config.config_file import to_plain
from tests.fakes.launched import launched, left_over, parent, until
from tests.fakes.processes import assert_sound
from tests.fakes.runs import rows, small_config


@pytest.mark.soak
def test_a_learner_that_is_killed_goes_on_with_its_run_and_an_ended_run_is_left_alone(
    tmp_path: Path, qwen2: Path
) -> None:
    config = small_config(
        tmp_path / "runs",
        qwen2,
        run={"iterations": 12},
        rollout={"max_turns": 1, "max_tokens_per_turn": 12},
        evaluation={"every": 0, "tasks": 1},
        checkpoint={"every": 2},
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
    file = tmp_path / "roles.yaml"
    file.write_text(yaml.safe_dump({"config": str(tmp_path / "config.yaml"), "roles": {"learner": {}}}))
    with launched(file) as launch:
        run = launch.run
        until(lambda: any((run / "checkpoints").glob("*2/COMPLETE")), launch.printed)
        (learner,) = [pid for pid in left_over(run) if parent(pid) == launch.id]
        os.kill(learner, signal.SIGKILL)
        assert launch.wait() == 0, launch.printed
    assert "learner | [has died with signal 9; started again in 1 s]" in launch.printed
    assert f"resumed {run} after iteration" in launch.printed
    assert_sound(run, iterations=12)
    assert rows(run / "replay.sqlite", "select count(*) from runs") == [(1,)]
    with launched(file, "--run", str(run)) as launch:
        assert launch.wait() == 0, launch.printed
    assert f"{run} has ended after iteration 12: nothing is left" in launch.printed
