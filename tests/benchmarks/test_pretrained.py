"""When a run of the pretrained model has reached its level, and what it is made with."""

import json
from pathlib import Path

import pytest

from agentloop.config.config_file import load_config
from benchmarks._replay_figures import percent_more, to_target
from benchmarks.pretrained import ARMS, COLUMNS, newest_success, settings


def test_newest_success_is_that_of_the_last_128_fresh_episodes() -> None:
    rows = [(number, 32, success) for number, success in enumerate([0.0, 0.25, 0.5, 0.75, 1.0], 1)]
    assert newest_success(rows[:3]) == 0.0  # 96 are too few to say
    assert newest_success(rows) == pytest.approx((0.25 + 0.5 + 0.75 + 1.0) / 4)


def test_costs_are_counted_to_the_iteration_that_reached_the_level() -> None:
    iterations = [[32, 16, 0.5, 1000, 4, 30.0, 40.0]] * 5
    mine, other = ({"columns": COLUMNS, "iterations": iterations, "reached": reached} for reached in (2, 4))
    assert to_target(mine, "fresh") == 64 and to_target(other, "tokens") == 4000
    assert percent_more(mine, other, "cpu") == -50.0
    assert percent_more(mine, {**other, "reached": None}, "steps") == pytest.approx(-60.0)  # 8 of all 20


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_configuration_with_as_many_steps_for_as_many_fresh_episodes(arm: str) -> None:
    given = [f"{key}={json.dumps(value)}" for key, value in settings(arm, seed=0).items()]
    config = load_config(Path("examples/calculator_agent/train.yaml"), given)
    fresh = round(config.batch.trajectories * (1 - config.replay.fraction))
    assert fresh == (24 if arm == "replay_instead" else 32)
    assert config.batch.trajectories / config.batch.mini_batch == 4
    assert config.run.iterations * fresh == 768
